"""Saves in the background: each rank writes in a thread, and reports through the store of the group.

No collective is called there, so the training that goes on meanwhile may call as many as it likes.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined] # documented, yet not declared

from shardwise.checkpoint.ranks import Ranks
from shardwise.comm.group import listed, store_of, timeout_of
from shardwise.comm.peers import Heartbeats, StoreChannel, who_is_gone
from shardwise.errors import CheckpointError

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
    status = _SaveStatus(ranks, checkpoint)

    def run() -> None:
        status.heartbeats.begin()  # before this thread steps back: its threads do as it does
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SLOWER)
        error: Exception | None = CheckpointError(f"the save to '{path}' was lost")
        try:
            try:
                words = write()
            except Exception as failure:
                status.report({"error": f"{failure}"})
            else:
                status.report({"words": words})
            if ranks.first:
                status.conclude(commit)
            error = status.verdict()
        except Exception as failure:  # the first rank may be gone, and yet have done its part
            error = CheckpointError(f"the save to '{path}' was lost: {failure}")
            if is_there():
                error = None
        finally:
            if error is not None:
                with suppress(Exception):
                    discard()
                logging.getLogger("shardwise").error("a save in the background failed: %s", error)
            status.heartbeats.end()
            handle._end(error)

    try:
        if not _finishing:
            # Before the pools of threads end, with which a storage may write.
            getattr(threading, "_register_atexit", atexit.register)(_finish)
            _finishing.append(True)
        threading.Thread(target=run, name=f"shardwise save {checkpoint}").start()
    except RuntimeError as failure:  # there are too many threads, or the process is about to end
        status.report({"error": f"{failure}"})
        if ranks.first:
            status.conclude(commit)
        raise CheckpointError(f"no thread can save to '{path}' in the background: {failure}") from failure
    _under_way.append(handle)
    return handle


class _SaveStatus:
    """What the ranks tell each other of one save: what became of each file, and whether the checkpoint is there."""

    def __init__(self, ranks: Ranks, checkpoint: str) -> None:
        group = ranks.group if len(ranks.all) > 1 else None
        store = HashStore() if group is None else store_of(group)
        if store is None:
            raise CheckpointError(
                "the group has no store by which ranks could talk of a save in the background: wait for it"
            )
        self._ranks, self._channel = ranks, StoreChannel(store, f"shardwise/save/{checkpoint}")
        self._timeout = None if group is None else timeout_of(group).total_seconds()
        self.heartbeats = Heartbeats(group, ranks.here, self._channel)

    def report(self, outcome: dict[str, Any]) -> None:
        """What became of this rank's file."""
        self._channel.write(self._ranks.here, outcome)

    def conclude(self, commit: Callable[[Iterable[Any]], None]) -> None:
        """On the first rank: when all have reported, commit or not, and say which."""
        ranks = self._ranks.all
        try:
            self._wait(ranks, "whether all files are written")
            reports = [self._channel.read(rank) for rank in ranks]
            for rank, report in zip(ranks, reports, strict=True):
                if "error" in report:
                    raise CheckpointError(f"rank {rank} could not write: {report['error']}")
            commit([report["words"] for report in reports])
        except Exception as error:
            self._channel.decide({"error": str(error)})
        else:
            self._channel.decide({})
        with suppress(RuntimeError):  # a store that cannot
            self._channel.delete(ranks)

    def verdict(self) -> Exception | None:
        """What the first rank has said."""
        # The first rank waits for all, and then writes the index.
        self._wait(["verdict"], "whether the checkpoint is there", times=3)
        found = self._channel.decision()
        return CheckpointError(found["error"]) if "error" in found else None

    def _wait(self, keys: Sequence[Any], what: str, times: int = 1) -> None:
        """Until these ranks have reported, or the first one has decided; raises if one is gone."""

        def whose(missing: Sequence[Any]) -> list[int]:
            return [self._ranks.all[0] if key == "verdict" else key for key in missing]

        def check(missing: list[Any]) -> None:
            gone = self.heartbeats.gone(whose(missing))
            gone = [rank for rank in whose(self._channel.missing(keys)) if rank in gone]  # unless they had reported
            if gone:
                raise CheckpointError(f"{who_is_gone(gone)} before it was known {what}")

        timeout = None if self._timeout is None else times * self._timeout
        late = self._channel.wait(keys, timeout, check, self.heartbeats.every)
        if late:
            raise CheckpointError(f"ranks {listed(whose(late))} have not told within the group's timeout {what}")
