"""The thread that looks after collectives of accelerators, with stand-ins for them."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from shardwise.errors import RankMismatchError, TransferError
from shardwise.meeting import Said, post, watch, watchdog
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

    def is_completed(self) -> bool:
        """So NCCL says."""
        return True

    def wait(self) -> None:
        """Tells why."""
        raise RuntimeError("remote process exited")


@ranks(2)
def test_a_collective_that_has_failed_is_ended_on_all_ranks() -> None:
    """On the one that finds out, and on the one whose kernel waits for it."""
    group = dist.new_group([0, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(post, "PATIENCE", 0.05)
        follow(group, Said({"verb": "something"}))
        watch(Endless() if dist.get_rank() else Failed(), group)
        with pytest.raises(TransferError, match=r"rank 0 could not .*torch says: remote process exited"):
            wait_for_a_verdict(group)
        with pytest.raises(TransferError, match="cannot be used any more"):
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
        while gone in watchdog._watched:
            time.sleep(post.PATIENCE)
        watch(Failed(), group)
        with pytest.raises(TransferError, match="remote process exited"):
            wait_for_a_verdict(group)
