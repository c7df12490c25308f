"""A run in the background that fails while the ranks talk about something else: neither comes in the other's way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import chunks
from tests.comm.disagreement.given import impatient

import shardwise
from shardwise import StateTransfer
from shardwise.comm.group import call_history, tagged_messages
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

PLAIN = torch.arange(48.0).reshape(8, 6)
FAILS = 1  # the rank on which on_arrival raises
MOMENTS = 9  # in `full_tensor`, and the one after it


class Moments:
    """The moments at which the main thread may be overtaken: before and after each entry and each wait."""

    def __init__(self, chosen: int, overtaken: Callable[[], None]) -> None:
        self._left, self._overtaken = chosen, overtaken

    def pass_one(self) -> None:
        """One moment is over; at the chosen one, the other thread is let go on, and waited for."""
        if threading.current_thread() is threading.main_thread():
            self._left -= 1
            if self._left == -1:
                self._overtaken()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, between two moments."""

        def passing(*args: Any, **kwargs: Any) -> Any:
            self.pass_one()
            value = function(*args, **kwargs)
            self.pass_one()
            return value

        return passing

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within this context, moments are counted; the chosen one has come when it ends."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(call_history.CallHistory, "add", self.around(call_history.CallHistory.add))
            patch.setattr(tagged_messages.TaggedMessages, "wait", self.around(tagged_messages.TaggedMessages.wait))
            yield
        while self._left >= 0:
            self.pass_one()


class Looks:
    """Looks of the background at what the other ranks do: one at a time, when it is told to."""

    def __init__(self, *, free: bool) -> None:
        self._asked, self._over = threading.Semaphore(0), threading.Semaphore(0)
        self._free = free
        self._wait_long = tagged_messages.TaggedMessages._wait_long

    def wait_long(self, waiting: Any, job: Any, look: Any, patience: float) -> None:
        """Messages have not come for a while."""

        def looks_when_told(peers: Any) -> None:
            if not self._free:
                self._asked.acquire()
            try:
                look(peers)
            finally:
                self._over.release()

        in_background = threading.current_thread().name == "shardwise transfer"
        self._wait_long(waiting, job, looks_when_told if in_background else look, patience)

    def one(self) -> None:
        """Let it look once."""
        self._asked.release()
        self._over.acquire()

    def all(self) -> None:
        """Let it look as it likes."""
        self._free = True
        self._asked.release()


@pytest.mark.parametrize("here", range(MOMENTS))
@ranks(2)
def test_a_failure_in_the_background_at_any_moment(here: int) -> None:
    """One rank fails, and the other finds out, at any moment of a call of the main thread: the call goes well on both,
    the run raises on both, and they are in step."""
    x = shard_tensor(PLAIN, chunks(0, 0, 1))
    raises = threading.Event()

    def refuse(name: str, boxes: list[torch.Tensor]) -> None:
        if dist.get_rank() == FAILS and refusing:
            raises.wait()
            raise ValueError("no room")

    transfer = StateTransfer({"a": x}, {"a": chunks(1, 0, 1).layout(PLAIN.shape)}, on_arrival=refuse)
    for there in range(here % 2, MOMENTS, 2):
        looks, refusing = Looks(free=dist.get_rank() == FAILS), True
        raises.clear()
        with impatient(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                tagged_messages.TaggedMessages, "_wait_long", lambda *args, looks=looks: looks.wait_long(*args)
            )
            handle = transfer.run(wait=False)

            def fail(handle: Any = handle) -> None:
                raises.set()
                handle._thread.join()

            overtaken = fail if dist.get_rank() == FAILS else looks.one
            with Moments(here if dist.get_rank() == FAILS else there, overtaken).watched():
                assert torch.equal(x.full_tensor(), PLAIN)
            looks.all()
            with pytest.raises(ValueError, match="no room"):
                handle.wait()
            shardwise.check()
            refusing = False
            transfer.run()
            assert torch.equal(x.full_tensor(), PLAIN)


def fails_alone(x: Any, then: Callable[[], object]) -> None:
    """An op in which something is wrong on one rank, and what the other rank does after it."""
    torch.gather(x, 1, shardwise.from_local(torch.full((4, 1), 99 if dist.get_rank() == FAILS else 0)))
    then()


@ranks(2)
def test_a_rank_that_fails_before_a_run_does_not_begin_it() -> None:
    """The other rank, whose run waits in the background, raises the same and once; then both are in step."""
    x, target = shard_tensor(PLAIN, chunks(0, 0, 1)), shardwise.zeros(chunks(1, 0, 1), 8, 6)
    transfer = StateTransfer({"a": x}, {"a": target})
    with impatient():
        with pytest.raises((RuntimeError, IndexError)):
            fails_alone(x, lambda: transfer.run(wait=False).wait())
        shardwise.check()
        transfer.run()
    assert torch.equal(target.full_tensor(), PLAIN)


@ranks(2)
def test_an_error_in_a_call_does_not_end_a_run_that_all_have_begun() -> None:
    """What all ranks raise in the main thread is no affair of a run in the background."""
    x = shard_tensor(PLAIN, chunks(0, 0, 1))
    arrived: list[torch.Tensor] = []
    goes_on = threading.Event()

    def take(name: str, boxes: list[torch.Tensor]) -> None:
        goes_on.wait()
        arrived.extend(boxes)

    transfer = StateTransfer({"a": x}, {"a": chunks(1, 0, 1).layout(PLAIN.shape)}, on_arrival=take)
    handle = transfer.run(wait=False)
    with impatient():
        with pytest.raises((RuntimeError, IndexError)):
            fails_alone(x, x.full_tensor)
        assert torch.equal(x.full_tensor(), PLAIN)
        goes_on.set()
        handle.wait()
    assert torch.equal(arrived[0], PLAIN.chunk(2, 1)[dist.get_rank()])
    shardwise.check()
