"""A thread that looks after what accelerators are sending, for the host does not wait for it.

The last collective of each group is kept. If it takes long, the thread checks peers, as a rank that waits does. On a
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

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.comm.group import GroupState, group_state, is_capturing, tagged_messages
from shardwise.comm.peers.status import find_verdict, given_up, loss_notice, mark_unusable, require_usable, wait_for_all

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


NOT_BEGUN = _Beginning()


@dataclass(eq=False, slots=True)
class _Watched:
    """A collective, when it was begun and last checked, and in which epoch."""

    work: Any
    begun: float
    checked: float
    epoch: int


# The last collective of each group, None once it is over. The thread runs while there is a group here.
_watched: dict[GroupState, _Watched | None] = {}
_checking = threading.Lock()  # held while the thread holds a collective
_dropped: list[_Watched] = []  # kept so that the thread never drops the last reference
_inherited: list[_Watched | None] = []  # in a forked child, never freed: that may need threads that are not there
_changed = threading.Event()
_ending = threading.Lock()
_starting = threading.RLock()
_thread: threading.Thread | None = None


def watch(work: Any, process_group: ProcessGroup) -> None:
    """Check a collective that was begun in the last call of this group's history, until it has ended.

    A collective that is captured in a CUDA graph is not under way, and CUDA must not be asked about it.
    """
    if is_capturing():
        return
    state, now = group_state(process_group), time.monotonic()
    before = _watched.get(state)
    if before is None and state not in _watched and not _start(state):
        return
    with _starting:
        if state not in _watched:  # it was ended just now
            return
        _watched[state] = _Watched(work, now, now, state.history.epoch)
    if _checking.acquire(blocking=False):
        _dropped.clear()
        _checking.release()
    elif before is not None:
        _dropped.append(before)
    if not _changed.is_set():
        _changed.set()


def _start(state: GroupState) -> bool:
    """Have a thread that checks the collectives of this group, unless the group is destroyed."""
    global _thread
    with _starting:
        if not state.is_ended:
            state.at_end.add(_stop)
            _watched[state] = None
            if _thread is None:
                _thread = threading.Thread(target=_run, name="shardwise-watchdog", daemon=True)
                _thread.start()
        return not state.is_ended


def _stop(state: GroupState) -> None:
    """Check nothing of this group any more."""
    with _starting:
        _watched.pop(state, None)
    _changed.set()


def is_watched(process_group: ProcessGroup) -> bool:
    """Whether a collective of the group is under way, as far as the thread knows."""
    return _watched.get(group_state(process_group)) is not None


def wait_for_device(process_group: ProcessGroup, device: torch.device) -> None:
    """Wait on the host until all that was given to a device has ended, or is known never to: that is raised.

    For who is about to wait for the device, which nobody could call back. It is the stream that is asked: a collective
    says that it is over also when it has failed, as when another rank has ended it, and its kernel runs on.
    """
    ended = torch.get_device_module(device).Event()
    ended.record()  # on the stream that waits for the collectives
    begun = checked = time.monotonic()
    while not (ended.query() and _has_ended(process_group)):
        require_usable(process_group)
        now = time.monotonic()
        if now - checked >= tagged_messages.PATIENCE:
            error, checked = find_verdict(process_group, range(process_group.size())), now
            if error is not None:
                abort_group(process_group, error)
        time.sleep(0 if now - begun < SOON else PAUSE / 1000)
    require_usable(process_group)


def wait_until_unwatched() -> None:
    """Wait until nothing is under way and the thread asks CUDA no more: a capture of a graph would end by that."""
    for state in tuple(_watched):
        group = state.group
        if group is not None and is_watched(group):
            wait_for_device(group, torch.device("cuda", torch.cuda.current_device()))
    while any(_watched.copy().values()):
        time.sleep(SOON)


def _has_ended(process_group: ProcessGroup) -> bool:
    watched = _watched.get(group_state(process_group))
    return watched is None or _is_over(watched.work)


def _forget() -> None:
    global _thread, _ending, _checking, _starting
    _thread, _ending, _checking, _starting = None, threading.Lock(), threading.Lock(), threading.RLock()
    _inherited.extend((*_watched.values(), *_dropped))
    _watched.clear()
    _dropped.clear()
    _changed.clear()


os.register_at_fork(after_in_child=_forget)


def _run() -> None:
    global _thread
    while True:
        _changed.wait()
        _changed.clear()
        while any(_watched.copy().values()):
            time.sleep(PAUSE)
            for state in _watched.copy():
                with _checking:
                    _check(state)
            del state
        _dropped.clear()  # nothing is under way
        with _starting:
            if not _watched:
                _thread = None
                return


def _check(state: GroupState) -> None:
    group, watched = state.group, _watched.get(state)
    if group is not None and watched is not None:
        try:
            _check_work(group, watched)
        except Exception:  # the group was destroyed meanwhile; whatever it is, the thread goes on
            _drop(state)


def _drop(state: GroupState) -> None:
    """Check the collective of this group no more."""
    watched = _watched.get(state)
    if watched is not None:
        _watched[state] = None
        _dropped.append(watched)


def _check_work(group: ProcessGroup, watched: _Watched) -> None:
    now = time.monotonic()
    if _is_over(watched.work):
        failed = _failure(watched.work)
        if failed is not None:
            what = "send or receive what was on its way to other ranks"
            abort_group(group, find_verdict(group, range(group.size())) or loss_notice(what, failed, group))
        elif _watched.get(group_state(group)) is watched:
            _drop(group_state(group))
    elif now - watched.begun >= tagged_messages.PATIENCE and now - watched.checked >= tagged_messages.PATIENCE:
        error = find_verdict(group, range(group.size()))
        if error is None and group_state(group).history.epoch != watched.epoch and now - watched.begun >= LONG:
            error = given_up()
        if error is not None:
            abort_group(group, error)
        watched.checked = now


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


def abort_pending(process_group: ProcessGroup, error: Exception) -> None:
    """Before this error is raised, for a rank is gone, end what an accelerator is sending in this group, if it is not
    over and well. If the thread is ending it already, wait for that, and raise it once."""
    state = group_state(process_group)
    history, watched = state.history, _watched.get(state)
    waits = watched is not None and not (_is_over(watched.work) and _failure(watched.work) is None)
    if waits or history.broken:
        abort_group(process_group, error)
        history.verdict = None


def abort_group(process_group: ProcessGroup, error: Exception) -> None:
    """Have the next call raise this error, and those after it that the group is of no use; end what is under way.

    Torch ends a process that finds the connection to another rank closed. So the ranks wait for each other, for a
    while, and then end their communicators together.
    """
    state = group_state(process_group)
    history = state.history
    with _ending:  # so whoever comes second comes back when it is done
        if not history.broken:
            mark_unusable(process_group, error)
            history.verdict = error
            _drop(state)  # from here on another thread may go on, and must find the verdict
            wait_for_all(process_group, TOGETHER)
            with suppress(RuntimeError, AttributeError):
                process_group.abort()
        _drop(state)
