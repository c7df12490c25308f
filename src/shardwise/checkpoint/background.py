"""Saves in the background: each rank writes in a thread, and word of it goes through the store of the group.

No collective is called there, so the training that goes on meanwhile may call as many as it likes.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from shardwise.checkpoint.pulse import Pulse
from shardwise.checkpoint.ranks import Ranks
from shardwise.errors import CheckpointError
from shardwise.meeting import listed, who_is_gone
from shardwise.meeting.group import store_of, timeout_of

SOON, LATER = 0.005, 0.2  # seconds between two looks into the store, at first and at last
SLOWER = 10  # how much a thread that writes steps back behind those that compute, as nice(1) counts

_under_way: list[SaveHandle] = []
_finishing: list[bool] = []  # whether the end of the process is known to wait for saves
os.register_at_fork(after_in_child=_under_way.clear)  # where their threads are not


def _finish() -> None:
    """At the end of the process: let saves be over first."""
    for handle in _under_way:
        handle._over.wait()


class SaveHandle:
    """A save in the background, as `save` with ``wait=False`` gives it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._over = threading.Event()
        self._error: Exception | None = None
        self._told = False

    def __repr__(self) -> str:
        how = "under way" if not self._over.is_set() else "failed" if self._error else "done"
        return f"SaveHandle('{self.path}', {how})"

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the checkpoint is there on all ranks, or raise what went wrong, the same on all.

        After ``timeout`` seconds a TimeoutError; the save goes on.
        """
        if not self._over.wait(timeout):
            raise TimeoutError(f"the save to '{self.path}' was not over after {timeout} seconds; it goes on")
        self._told = True
        if self._error is not None:
            raise self._error

    def _end(self, error: Exception | None) -> None:
        self._error = error
        self._over.set()


def earlier_saves() -> list[SaveHandle]:
    """The saves in the background before this one, when they are over."""
    found = list(_under_way)
    for handle in found:
        handle._over.wait()
        with suppress(ValueError):  # another thread has
            _under_way.remove(handle)
    return found


def require_well(handles: Iterable[SaveHandle]) -> None:
    """Raise what went wrong with earlier saves, if nobody has asked. On some ranks somebody may have: call it where
    all ranks fail together."""
    for handle in handles:
        if handle._error is not None and not handle._told:
            handle._told = True
            raise CheckpointError(f"the save to '{handle.path}' before this one failed: {handle._error}")


def begin_save(
    ranks: Ranks,
    checkpoint: str,
    path: str,
    *,
    write: Callable[[], Any],
    commit: Callable[[Iterable[Any]], None],
    discard: Callable[[], None],
    is_there: Callable[[], bool],
) -> SaveHandle:
    """Write in a thread; when all ranks have, the first one commits. Whether it has can also be seen where it is."""
    handle = SaveHandle(path)
    talk = _Talk(ranks, checkpoint)

    def run() -> None:
        talk.pulse.begin()  # before this thread steps back: its threads do as it does
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SLOWER)
        error: Exception | None = CheckpointError(f"the save to '{path}' was lost")
        try:
            try:
                words = write()
            except Exception as failure:
                talk.tell({"error": f"{failure}"})
            else:
                talk.tell({"words": words})
            if ranks.first:
                talk.conclude(commit)
            error = talk.verdict()
        except Exception as failure:  # the first rank may be gone, and yet have done its part
            error = CheckpointError(f"the save to '{path}' was lost: {failure}")
            if is_there():
                error = None
        finally:
            if error is not None:
                with suppress(Exception):
                    discard()
                logging.getLogger("shardwise").error("a save in the background failed: %s", error)
            talk.pulse.end()
            handle._end(error)

    try:
        if not _finishing:
            # Before the pools of threads end, with which a storage may write.
            getattr(threading, "_register_atexit", atexit.register)(_finish)
            _finishing.append(True)
        threading.Thread(target=run, name=f"shardwise save {checkpoint}").start()
    except RuntimeError as failure:  # there are too many threads, or the process is about to end
        talk.tell({"error": f"{failure}"})
        if ranks.first:
            talk.conclude(commit)
        raise CheckpointError(f"no thread can save to '{path}' in the background: {failure}") from failure
    _under_way.append(handle)
    return handle


class _Talk:
    """What the ranks tell each other of one save."""

    def __init__(self, ranks: Ranks, checkpoint: str) -> None:
        self._ranks, self._key = ranks, f"shardwise/save/{checkpoint}"
        self.pulse = Pulse(ranks, self._key)
        self._alone: dict[str, bytes] | None = {} if len(ranks.all) == 1 else None
        self._store = None if ranks.group is None else store_of(ranks.group)
        self._patience = None if ranks.group is None else timeout_of(ranks.group).total_seconds()
        if self._alone is None and self._store is None:
            raise CheckpointError(
                "the group has no store by which ranks could talk of a save in the background: wait for it"
            )

    def tell(self, words: dict[str, Any]) -> None:
        """What became of this rank's file."""
        self._set(f"{self._key}/{self._ranks.here}", words)

    def conclude(self, commit: Callable[[Iterable[Any]], None]) -> None:
        """On the first rank: when all have told, commit or not, and say which."""
        keys = {rank: f"{self._key}/{rank}" for rank in self._ranks.all}
        told: list[dict[str, Any]] = []
        try:
            self._await(keys, "whether all files are written")
            told = [self._get(key) for key in keys.values()]
            failed = [(rank, one) for rank, one in zip(keys, told, strict=True) if "error" in one]
            if failed:
                raise CheckpointError(f"rank {failed[0][0]} could not write: {failed[0][1]['error']}")
            commit([one["words"] for one in told])
        except Exception as error:
            self._set(f"{self._key}/verdict", {"error": str(error)})
        else:
            self._set(f"{self._key}/verdict", {})
        if self._store is not None:
            with suppress(RuntimeError):  # a store that cannot
                for key in keys.values():
                    self._store.delete_key(key)

    def verdict(self) -> Exception | None:
        """What the first rank has said."""
        # The first rank waits for all, and then writes the index.
        self._await({self._ranks.all[0]: f"{self._key}/verdict"}, "whether the checkpoint is there", times=3)
        found = self._get(f"{self._key}/verdict")
        return CheckpointError(found["error"]) if "error" in found else None

    def _await(self, keys: dict[int, str], what: str, times: int = 1) -> None:
        """Until these ranks have told something, each by its key; raises if one is gone."""
        begun, pause = time.monotonic(), SOON
        looked = begun
        while not self._are_there(keys.values()):
            now = time.monotonic()
            if self._patience is not None and now - begun > times * self._patience:
                late = self._untold(keys)
                raise CheckpointError(f"ranks {listed(late)} have not told within the group's timeout {what}")
            if now - looked >= self.pulse.every:
                looked = now
                gone = self.pulse.gone(self._untold(keys))
                gone = self._untold({rank: keys[rank] for rank in gone})  # unless they had told
                if gone:
                    raise CheckpointError(f"{who_is_gone(gone)} before it was known {what}")
            time.sleep(pause)
            pause = min(pause * 1.5, LATER)

    def _untold(self, keys: dict[int, str]) -> list[int]:
        return [rank for rank, key in keys.items() if not self._are_there([key])]

    def _are_there(self, keys: Iterable[str]) -> bool:
        if self._alone is not None:
            return all(key in self._alone for key in keys)
        assert self._store is not None
        return bool(self._store.check(list(keys)))

    def _set(self, key: str, words: dict[str, Any]) -> None:
        text = json.dumps(words).encode()
        if self._alone is not None:
            self._alone[key] = text
        else:
            assert self._store is not None
            self._store.set(key, text)

    def _get(self, key: str) -> dict[str, Any]:
        if self._alone is not None:
            text = self._alone[key]
        else:
            assert self._store is not None
            text = self._store.get(key)
        found: dict[str, Any] = json.loads(text)
        return found
