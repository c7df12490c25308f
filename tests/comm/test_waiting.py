"""How long a rank waits for another."""

from __future__ import annotations

import sys
import weakref
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardwise import check
from shardwise.comm.group import tagged_messages
from shardwise.comm.group.message_threads import MessageThreads, PendingMessages
from shardwise.errors import TransferError
from shardwise.testing import ranks


@ranks(2)
def test_a_rank_waits_as_long_as_the_group_allows() -> None:
    """For another that never comes."""
    group, done = dist.new_group([0, 1]), dist.new_group([0, 1])
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tagged_messages, "timeout_of", lambda _: timedelta(seconds=0.1))
            with pytest.raises(TransferError, match="taken longer than the group's timeout"):
                check(group)
    dist.barrier(done)


class Clock:
    """A clock, and a lock that nobody releases: to wait for it is all that takes time."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    def acquire(self, timeout: float) -> bool:
        """In vain."""
        self.now += timeout
        return False


@pytest.mark.parametrize("allowed", [1.2, 5.0, 1800.0])
@ranks(1)
def test_a_rank_waits_no_longer_than_the_group_allows(allowed: float) -> None:
    """However seldom it looks what the other does, which is every two seconds at most."""
    clock, looks, job = Clock(), list[float](), PendingMessages(None, [])
    job.done = clock
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tagged_messages, "time", clock)
        patch.setattr(tagged_messages, "timeout_of", lambda _: timedelta(seconds=allowed))
        clock.acquire(tagged_messages.PATIENCE)  # as whoever calls it has
        with pytest.raises(TimeoutError):
            tagged_messages.TaggedMessages(dist.group.WORLD)._wait_long(
                job, lambda _: looks.append(clock.now), tagged_messages.PATIENCE
            )
    assert clock.now == pytest.approx(100.0 + allowed)
    assert max(np.diff(looks), default=0.0) <= tagged_messages.AT_MOST + 1e-9


class Work:
    """A message that has come."""

    def wait(self, _: timedelta) -> None:
        """Is over at once."""


def test_memory_of_messages_is_free_when_a_wait_ends() -> None:
    """The thread that has waited for them drops them first, however threads take turns."""
    threads, interval = MessageThreads(), sys.getswitchinterval()
    threads.start()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(300):
            job = PendingMessages(None, [(Work(), 0, torch.empty(1))])
            memory = weakref.ref(job)
            threads.wait_for(job)
            job.done.acquire()
            del job
            assert memory() is None
    finally:
        sys.setswitchinterval(interval)
        threads.end()
