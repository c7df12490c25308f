"""A thread that looks after what accelerators are sending, for the host does not wait for it.

The last collective of each group is kept. If it takes long, the thread looks aside as a rank does that waits. On a
verdict it ends the group's communicator, so that a host that is blocked comes back, and the next call raises. So it
does if the collective has failed, as it has where a rank is gone: its kernel would wait for that rank for ever.

The thread must not wait for the device itself. CUDA is locked while another thread waits for it, as when it loads a
kernel; and to drop a collective is to ask CUDA to drop its events. So the thread drops none while others are under way:
whoever begins the next one does.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.meeting import post
from shardwise.meeting.aside import break_off, find_verdict, given_up, require_sound, told_of_loss, wait_to_end
from shardwise.meeting.chain import ledger_of

SUCCESS = 0  # of torch.distributed.WorkResult
LONG = 5.0  # seconds after which a collective that was begun before an error of all ranks will not end
PAUSE = 0.1  # seconds between two glances at collectives that are under way
SOON = 0.002  # within which most of them end
TOGETHER = 2.5  # seconds that a rank waits for the others before it ends a communicator: within it they look twice


class _Beginning:
    """Stands for a collective that is not begun yet."""

    def is_completed(self) -> bool:
        """No."""
        return False


BEGINNING = _Beginning()


@dataclass(eq=False, slots=True)
class _Watched:
    """A collective, when it was begun and looked for last, and in which epoch."""

    work: Any
    begun: float
    looked: float
    epoch: int


_watched: WeakKeyDictionary[ProcessGroup, _Watched] = WeakKeyDictionary()
_looking = threading.Lock()  # held while the thread has one of them in its hands
_dropped: list[_Watched] = []  # which the thread is not to be the last to have
_changed = threading.Event()
_ending = threading.Lock()
_thread: threading.Thread | None = None


def watch(work: Any, process_group: ProcessGroup) -> None:
    """Look after a collective that was begun in the last call of this group's chain, until it has ended."""
    global _thread
    now = time.monotonic()
    before = _watched.get(process_group)
    _watched[process_group] = _Watched(work, now, now, ledger_of(process_group).epoch)
    if _looking.acquire(blocking=False):
        _dropped.clear()
        _looking.release()
    elif before is not None:
        _dropped.append(before)
    if not _changed.is_set():
        _changed.set()
    if _thread is None:
        _thread = threading.Thread(target=_run, name="shardwise-watchdog", daemon=True)
        _thread.start()


def outlast(process_group: ProcessGroup, device: torch.device) -> None:
    """Wait on the host until all that was given to a device has ended, or is known never to: that is raised.

    For who is about to wait for the device, which nobody could call back. It is the stream that is asked: a collective
    says that it is over also when it has failed, as when another rank has ended it, and its kernel runs on.
    """
    ended = torch.get_device_module(device).Event()
    ended.record()  # on the stream that waits for the collectives
    begun = looked = time.monotonic()
    while not (ended.query() and _has_ended(process_group)):
        require_sound(process_group)
        now = time.monotonic()
        if now - looked >= post.PATIENCE:
            error, looked = find_verdict(process_group, range(process_group.size())), now
            if error is not None:
                end(process_group, error)
        time.sleep(0 if now - begun < SOON else PAUSE / 1000)
    require_sound(process_group)


def _has_ended(process_group: ProcessGroup) -> bool:
    watched = _watched.get(process_group)
    return watched is None or _is_over(watched.work)


def _forget() -> None:
    global _thread, _ending, _looking
    _thread, _ending, _looking = None, threading.Lock(), threading.Lock()
    _watched.clear()
    _dropped.clear()
    _changed.clear()


os.register_at_fork(after_in_child=_forget)


def _run() -> None:
    while True:
        _changed.wait()
        _changed.clear()
        while _watched:
            time.sleep(PAUSE)
            for reference in _watched.keyrefs():  # a list, while other threads go on
                with _looking:
                    _look(reference())
        _dropped.clear()  # nothing is under way


def _look(group: ProcessGroup | None) -> None:
    watched = None if group is None else _watched.get(group)
    if group is not None and watched is not None:
        try:
            _glance(group, watched)
        except Exception:  # the group was destroyed meanwhile; whatever it is, the thread goes on
            _drop(group)


def _drop(group: ProcessGroup) -> None:
    """Look after its collective no more."""
    watched = _watched.pop(group, None)
    if watched is not None:
        _dropped.append(watched)


def _glance(group: ProcessGroup, watched: _Watched) -> None:
    now = time.monotonic()
    if _is_over(watched.work):
        failed = _failure(watched.work)
        if failed is not None:
            what = "send or receive what was on its way to other ranks"
            end(group, find_verdict(group, range(group.size())) or told_of_loss(what, failed, group))
        elif _watched.get(group) is watched:
            _drop(group)
    elif now - watched.begun >= post.PATIENCE and now - watched.looked >= post.PATIENCE:
        error = find_verdict(group, range(group.size()))
        if error is None and ledger_of(group).epoch != watched.epoch and now - watched.begun >= LONG:
            error = given_up()
        if error is not None:
            end(group, error)
        watched.looked = now


def _failure(work: Any) -> Exception | None:
    """Why a collective that is over has failed, if the backend says so. All else that is wrong the host will find.

    It is not waited for where its result is known: that would ask CUDA.
    """
    with suppress(AttributeError, RuntimeError):  # a backend that does not tell
        result = work.get_future_result()
        if result.done():
            failed = result.value() != SUCCESS
            return dist.DistBackendError("a collective has failed, or timed out") if failed else None
    try:
        work.wait()  # the stream of this thread has nothing to wait for
    except dist.DistBackendError as error:
        return error
    except RuntimeError:
        pass
    return None


def _is_over(work: Any) -> bool:
    try:
        return bool(work.is_completed())
    except RuntimeError:  # it has failed, as the host will find
        return True


def end_what_waits(process_group: ProcessGroup, error: Exception) -> None:
    """Before this error is raised, for a rank is gone, end what an accelerator is sending in this group, if it is not
    over and well. If the thread is ending it already, wait for that, and raise it once."""
    ledger, watched = ledger_of(process_group), _watched.get(process_group)
    waits = watched is not None and not (_is_over(watched.work) and _failure(watched.work) is None)
    if waits or ledger.broken:
        end(process_group, error)
        ledger.verdict = None


def end(process_group: ProcessGroup, error: Exception) -> None:
    """Have the next call raise this error, and those after it that the group is of no use; end what is under way.

    Torch ends a process that finds the connection to another rank closed. So the ranks wait for each other, for a
    while, and then end their communicators together.
    """
    ledger = ledger_of(process_group)
    with _ending:  # so whoever comes second comes back when it is done
        if not ledger.broken:
            break_off(process_group, error)
            ledger.verdict = error
            _drop(process_group)  # from here on another thread may go on, and must find the verdict
            wait_to_end(process_group, TOGETHER)
            with suppress(RuntimeError, AttributeError):
                process_group.abort()
        _drop(process_group)
