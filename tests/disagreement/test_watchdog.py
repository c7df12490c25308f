"""The thread that looks after collectives of accelerators, with stand-ins for them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.errors import RankMismatchError, TransferError
from shardwise.meeting import Said, lost, post, watch, watchdog
from shardwise.meeting.aside import require_sound
from shardwise.process_group import follow
from shardwise.testing import ranks


class Endless:
    """Stands for a collective that never ends, unless somebody ends it."""

    def is_completed(self) -> bool:
        """No."""
        return False


def wait_for_a_verdict(group: dist.ProcessGroup) -> None:
    """Ask until the watchdog has one, which is raised."""
    while require_sound(group):
        time.sleep(post.PATIENCE)


@ranks(2)
def test_ranks_in_different_collectives_end_them_together() -> None:
    """Both raise what differs, once, and then that the group is of no use; neither ends it before both know."""
    group, together = dist.new_group([0, 1]), threading.Event()

    def patiently(group: dist.ProcessGroup, seconds: float) -> None:
        wait_to_end(group, 60 * seconds)
        together.set()

    wait_to_end = watchdog.wait_to_end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(post, "PATIENCE", 0.05)
        patch.setattr(watchdog, "wait_to_end", patiently)
        follow(group, Said({"verb": f"something of rank {dist.get_rank()}"}))
        watch(Endless(), group)
        with pytest.raises(RankMismatchError, match="out of step"):
            wait_for_a_verdict(group)
        with pytest.raises(TransferError, match="cannot be used any more"):
            require_sound(group)
        assert together.wait(30)


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
    while group in watchdog._watched:
        time.sleep(post.PATIENCE)


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
        patch.setattr(post, "PATIENCE", 0.05)
        follow(group, Said({"verb": "something"}))
        watch(Endless() if dist.get_rank() else failed, group)
        with pytest.raises(TransferError, match=r"rank 0 could not .*torch says: " + says):
            wait_for_a_verdict(group)
        with pytest.raises(TransferError, match="cannot be used any more"):
            require_sound(group)
        watch(Failed(), group)
        forgotten(group)


@ranks(2)
def test_other_errors_of_a_device_are_for_the_host_to_find() -> None:
    """As those of a user's own kernel."""
    group = dist.new_group([0, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(post, "PATIENCE", 0.05)
        follow(group, Said({"verb": "something"}))
        for well in (Failed(RuntimeError("device-side assert")), Known(0)):
            watch(well, group)
            forgotten(group)
            require_sound(group)


@ranks(2)
def test_groups_that_are_destroyed_do_not_end_the_watchdog() -> None:
    """It looks after the others."""
    gone, group = dist.new_group([0, 1]), dist.new_group([0, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(post, "PATIENCE", 0.05)
        follow(gone, Said({"verb": "something"}))
        follow(group, Said({"verb": "something"}))
        dist.destroy_process_group(gone)
        watch(Failed(), gone)
        forgotten(gone)
        watch(Failed(), group)
        with pytest.raises(TransferError, match="remote process exited"):
            wait_for_a_verdict(group)


@ranks(1)
def test_a_loss_is_raised_once_and_after_all_is_ended() -> None:
    """Also if the watchdog and the host find it at the same time."""
    group, ended = dist.new_group([0]), threading.Event()

    def slowly(*given: Any) -> TransferError:
        time.sleep(1)
        return told_of_loss(*given)

    def patiently(*_: object) -> None:
        time.sleep(2)
        ended.set()

    told_of_loss = lost.told_of_loss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lost, "told_of_loss", slowly)
        patch.setattr(watchdog, "wait_to_end", patiently)
        follow(group, Said({"verb": "something"}))
        watch(Failed(), group)
        with pytest.raises(TransferError, match="could not compare"):
            lost.raise_lost("compare", RuntimeError("Connection closed by peer"), group)
        assert ended.is_set()
        with pytest.raises(TransferError, match="cannot be used any more"):
            require_sound(group)


class Dropped:
    """Stands for a collective that was well, which says who drops it."""

    def __init__(self, by: list[str], slow: float = 0) -> None:
        self._by, self._slow = by, slow

    def is_completed(self) -> bool:
        """It is over."""
        time.sleep(self._slow)
        return True

    def wait(self) -> None:
        """It was well."""

    def __del__(self) -> None:
        self._by.append(threading.current_thread().name)


@ranks(1)
def test_the_watchdog_does_not_drop_collectives_while_others_are_under_way() -> None:
    """To drop one may wait for the device, as whoever waits for the next one does."""
    one, other, by = dist.new_group([0]), dist.new_group([0]), list[str]()
    watch(Endless(), other)
    watch(Dropped(by), one)  # over before anything else begins
    forgotten(one)
    watch(Dropped(by, slow=1), one)  # replaced while the thread looks at it
    time.sleep(0.5)
    watch(Endless(), one)
    time.sleep(1.5)
    watch(Endless(), one)
    assert by == ["MainThread"] * 2
