"""The thread that looks after collectives of accelerators, with stand-ins for them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.patience import PATIENT, until

from shardwise.comm.agreement.steps import record_call
from shardwise.comm.group import tagged_messages
from shardwise.comm.group.call_history import CallFingerprint
from shardwise.comm.peers import lost, watchdog
from shardwise.comm.peers.status import require_usable
from shardwise.comm.peers.watchdog import watch
from shardwise.errors import RankMismatchError, TransferError
from shardwise.testing import ranks


class Endless:
    """Stands for a collective that never ends, unless somebody ends it, and counts who asks."""

    looks = 0

    def is_completed(self) -> bool:
        """No."""
        self.looks += 1
        return False


def wait_for_a_verdict(group: dist.ProcessGroup) -> None:
    """Ask until the watchdog has one, which is raised."""
    until(lambda: not require_usable(group))


@ranks(2)
def test_ranks_in_different_collectives_end_them_together() -> None:
    """Both raise what differs, once, and then that the group is of no use; neither ends it before both know."""
    group, together = dist.new_group([0, 1]), threading.Event()

    def patiently(group: dist.ProcessGroup, _: float) -> None:
        wait_for_all(group, PATIENT)
        together.set()

    wait_for_all = watchdog.wait_for_all
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tagged_messages, "PATIENCE", 0.05)
        patch.setattr(watchdog, "wait_for_all", patiently)
        record_call(group, CallFingerprint({"verb": f"something of rank {dist.get_rank()}"}))
        watch(Endless(), group)
        with pytest.raises(RankMismatchError, match="out of step"):
            wait_for_a_verdict(group)
        with pytest.raises(TransferError, match="cannot be used any more"):
            require_usable(group)
        assert together.wait(PATIENT)


class Failed:
    """Stands for a collective that is over, for a rank is gone."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error or dist.DistBackendError("remote process exited")

    def is_completed(self) -> bool:
        """So NCCL says."""
        return True

    def wait(self) -> None:
        """Tells why."""
        raise self._error


class Known(Endless):
    """Stands for a collective whose result is known, and which would wait for its kernel for ever."""

    def __init__(self, result: int) -> None:
        self._result = result

    def is_completed(self) -> bool:
        """So NCCL says."""
        return True

    def get_future_result(self) -> torch.futures.Future[int]:
        """As NCCL has it."""
        found: torch.futures.Future[int] = torch.futures.Future()
        found.set_result(self._result)
        return found


def forgotten(group: dist.ProcessGroup) -> None:
    """Wait until nothing of a group is looked after."""
    until(lambda: not watchdog.is_watched(group))


@pytest.mark.parametrize(
    ("failed", "says"),
    [(Failed(), "remote process exited"), (Known(2), "a collective has failed")],
    ids=["told when it is waited for", "known"],
)
@ranks(2)
def test_a_collective_that_has_failed_is_ended_on_all_ranks(failed: Any, says: str) -> None:
    """On the one that finds out, and on the one whose kernel waits for it. What is begun then is not looked after."""
    group = dist.new_group([0, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tagged_messages, "PATIENCE", 0.05)
        record_call(group, CallFingerprint({"verb": "something"}))
        watch(Endless() if dist.get_rank() else failed, group)
        with pytest.raises(TransferError, match=r"rank 0 could not .*torch says: " + says):
            wait_for_a_verdict(group)
        with pytest.raises(TransferError, match="cannot be used any more"):
            require_usable(group)
        watch(Failed(), group)
        forgotten(group)


@ranks(2)
def test_other_errors_of_a_device_are_for_the_host_to_find() -> None:
    """As those of a user's own kernel."""
    group = dist.new_group([0, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tagged_messages, "PATIENCE", 0.05)
        record_call(group, CallFingerprint({"verb": "something"}))
        for well in (Failed(RuntimeError("device-side assert")), Known(0)):
            watch(well, group)
            forgotten(group)
            require_usable(group)


@ranks(2)
def test_groups_that_are_destroyed_do_not_end_the_watchdog() -> None:
    """It looks after the others."""
    gone, group = dist.new_group([0, 1]), dist.new_group([0, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tagged_messages, "PATIENCE", 0.05)
        record_call(gone, CallFingerprint({"verb": "something"}))
        record_call(group, CallFingerprint({"verb": "something"}))
        dist.destroy_process_group(gone)
        watch(Failed(), gone)
        forgotten(gone)
        watch(Failed(), group)
        with pytest.raises(TransferError, match="remote process exited"):
            wait_for_a_verdict(group)


class FailedLater(Failed):
    """Stands for a collective that is over when an event says so."""

    def __init__(self, over: threading.Event) -> None:
        super().__init__()
        self._over = over

    def is_completed(self) -> bool:
        """Once it is."""
        return self._over.is_set()


class Queue:
    """A lock that says when somebody waits for it."""

    def __init__(self) -> None:
        self._lock, self.waited_for = threading.Lock(), threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.waited_for.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@ranks(1)
def test_a_loss_is_raised_once_and_after_all_is_ended() -> None:
    """Also if the watchdog and the host find it at the same time."""
    group, queue = dist.new_group([0]), Queue()
    found, ending, ended = threading.Event(), threading.Event(), threading.Event()

    def while_the_watchdog_ends(*given: Any) -> TransferError:
        found.set()
        assert ending.wait(PATIENT)
        return loss_notice(*given)

    def while_the_host_waits(*_: object) -> None:
        ending.set()
        if queue.waited_for.wait(PATIENT):
            ended.set()

    loss_notice = lost.loss_notice
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lost, "loss_notice", while_the_watchdog_ends)
        patch.setattr(watchdog, "wait_for_all", while_the_host_waits)
        patch.setattr(watchdog, "_ending", queue)
        record_call(group, CallFingerprint({"verb": "something"}))
        watch(FailedLater(found), group)
        with pytest.raises(TransferError, match="could not compare"):
            lost.raise_lost("compare", RuntimeError("Connection closed by peer"), group)
        assert ended.is_set()
        with pytest.raises(TransferError, match="cannot be used any more"):
            require_usable(group)


class Dropped:
    """Stands for a collective that was well, which says who drops it; to ask for it takes until an event."""

    def __init__(self, by: list[str], asked: threading.Event, go_on: threading.Event) -> None:
        self._by, self._asked, self._go_on = by, asked, go_on

    def is_completed(self) -> bool:
        """It is over."""
        self._asked.set()
        assert self._go_on.wait(PATIENT)
        return True

    def wait(self) -> None:
        """It was well."""

    def __del__(self) -> None:
        self._by.append(threading.current_thread().name)


@ranks(1)
def test_the_watchdog_does_not_drop_collectives_while_others_are_under_way() -> None:
    """To drop one may wait for the device, as whoever waits for the next one does."""
    one, other, by = dist.new_group([0]), dist.new_group([0]), list[str]()
    endless, asked, go_on = Endless(), threading.Event(), threading.Event()
    go_on.set()
    watch(endless, other)
    watch(Dropped(by, asked, go_on), one)  # over before anything else begins
    forgotten(one)
    asked.clear()
    go_on.clear()
    watch(Dropped(by, asked, go_on), one)  # replaced while the thread looks at it
    assert asked.wait(PATIENT)
    watch(Endless(), one)
    go_on.set()
    before = endless.looks
    until(lambda: endless.looks > before + 1)  # the thread has gone on

    def all_dropped() -> bool:
        watch(Endless(), one)  # drops nothing where the thread looks just then
        return len(by) == 2

    until(all_dropped)
    assert by == ["MainThread"] * 2
