"""Ranks that do different things where ops send no headers: all find out, and know which calls they were in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.cases import chunks
from tests.comm.disagreement.given import (
    COLUMNS,
    ODD,
    PLAIN,
    ROWS,
    WORLD,
    backward_of,
    impatient,
    rank,
    recorded,
    trained,
)
from tests.comm.sent_messages import sent

import shardwise
from shardwise.comm.agreement.small_messages import HEADER
from shardwise.comm.agreement.steps import in_step_sharing, record_call
from shardwise.comm.group import CallFingerprint, TaggedMessages, group_state
from shardwise.comm.group.call_history import KEPT
from shardwise.comm.group.message_threads import PendingMessages, drop
from shardwise.comm.transfer import all_reduce, all_to_all, wire
from shardwise.errors import RankMismatchError, TransferError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

Do = Callable[[Any], Any]


class Pair(NamedTuple):
    """What all ranks do but one, what that one does, and how the error calls both."""

    right: Do
    other: Do
    names: tuple[str, str]
    given: Callable[[], Any] = lambda: shard_tensor(PLAIN, ROWS)


def in_turn(*calls: Do) -> Do:
    """One after the other."""
    return lambda given: [call(given) for call in calls]


product: Do = lambda given: given @ given.t()  # noqa: E731 # its line is looked for
normed: Do = lambda given: given.softmax(0)  # noqa: E731
moved: Do = lambda given: given.redistribute(COLUMNS)  # noqa: E731
whole: Do = lambda given: given.full_tensor()  # noqa: E731
other_leaf: Do = lambda given: given[0].softmax(0)  # noqa: E731

PAIRS = {
    "two ops": Pair(product, normed, ("aten.m", "aten._softmax")),
    "an op and a verb": Pair(product, moved, ("aten.m", "redistribute")),
    "an op and a backward": Pair(backward_of, other_leaf, ("a transfer in the backward", "aten._softmax"), recorded),
    "in another order": Pair(in_turn(product, normed), in_turn(normed, product), ("aten.m", "aten._softmax")),
    "one more": Pair(in_turn(product, whole), in_turn(product, normed, whole), ("full_tensor", "aten._softmax")),
    "one less": Pair(in_turn(product, normed), product, ("aten._softmax", "afterwards")),
}


def caught_by(do: Callable[[], object]) -> str:
    """What this rank raises, in this call or when it meets the others."""
    try:
        do()
        for _ in range(2):
            in_step_sharing(world(), lambda: (None, {"verb": "afterwards"}, 0))
    except RankMismatchError as error:
        return str(error)
    return "nothing"


def world() -> Any:
    """The default group."""
    return dist.group.WORLD


def told(text: str) -> list[str]:
    """What all ranks have found."""
    return list(in_step_sharing(world(), lambda: (None, {}, text))[1])


@ranks(WORLD)
def test_both_calls_are_named_with_their_places() -> None:
    """On every rank alike; and afterwards all are in step."""
    with impatient():
        for name, pair in PAIRS.items():
            given = pair.given()
            found = told(caught_by(lambda pair=pair, given=given: (pair.other if rank() == ODD else pair.right)(given)))
            assert len(set(found)) == 1, f"{name}: {found}"
            for call in pair.names:
                assert call in found[0], f"{name}: {found[0]}"
            assert found[0].count(f"rank {ODD} ") > 0
            assert found[0].count("/disagreement/") >= 2, found[0]
            assert torch.equal(shard_tensor(PLAIN, ROWS).full_tensor(), PLAIN)
        lines = [one.__code__.co_firstlineno for one in (product, moved)]
        found = told(caught_by(lambda: (moved if rank() == ODD else product)(shard_tensor(PLAIN, ROWS))))
        assert all(f"test_chains.py:{line})" in found[0] for line in lines)


@ranks(WORLD)
def test_backward_transfers_that_differ() -> None:
    """After forwards that are the same: no rank takes the gradient of another transfer."""
    leaf = shard_tensor(PLAIN, ROWS).requires_grad_()
    one, other = leaf.redistribute(COLUMNS), leaf.redistribute(chunks(1, 2, 0, 1))
    with impatient():
        found = told(caught_by(lambda: backward_of((leaf, other if rank() == ODD else one))))
        assert len(set(found)) == 1
        assert found[0].count("a transfer in the backward") == 2
        assert ": from=" in found[0]
        assert leaf.grad is None
    backward_of((leaf, one))
    assert torch.equal(leaf.grad.full_tensor(), torch.ones_like(PLAIN))


@ranks(WORLD)
def test_who_needs_nothing_goes_on_and_finds_out_at_the_next_meeting() -> None:
    """Two ranks exchange data; the third one, which has no part in it, does otherwise."""
    for meet in (shardwise.check, lambda: shard_tensor(PLAIN, ROWS)):
        into, source = shard_tensor(PLAIN, chunks(0, 0, 2)), shard_tensor(PLAIN + 1, chunks(1, 0, 2))
        shardwise.check()
        into.copy_(source) if rank() != ODD else into.double().copy_(source)
        with pytest.raises(RankMismatchError) as caught:
            meet()
        text = str(caught.value)
        assert "rank 0 is in copy_" in text or "rank 0 was in copy_" in text, text
        assert "rank 1 in copy_" in text
        assert text.count("test_chains.py:") >= 2
        assert torch.equal(into.full_tensor(), PLAIN + 1)


@ranks(WORLD)
def test_groups_do_not_know_of_each_other() -> None:
    """Ranks that differ in one are in step in another."""
    group = dist.new_group([0, ODD])
    x = shard_tensor(PLAIN, chunks(0, 0, ODD), process_group=group) if rank() != 2 else None
    with impatient():
        if x is not None:
            with pytest.raises(RankMismatchError, match=r"out of step: rank 0 .* rank 1"):
                _ = x.softmax(0) if rank() else x @ x.t()
            assert torch.equal(x.full_tensor(), PLAIN)
    assert torch.equal(shard_tensor(PLAIN, ROWS).full_tensor(), PLAIN)
    shardwise.check()
    if x is not None:
        shardwise.check(group)


@contextmanager
def slow_messages() -> Iterator[None]:
    """Whoever waits for messages looks several times what the others are doing."""
    run = PendingMessages.run

    def run_late(messages: PendingMessages) -> None:
        time.sleep(0.3)
        run(messages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PendingMessages, "run", run_late)
        yield


@ranks(2)
def test_a_transfer_that_another_rank_did_not_begin_before_an_error_is_given_up() -> None:
    """Its data will never come."""
    x = shard_tensor(PLAIN, chunks(0, 0, 1))
    with impatient():
        with shardwise.validation(enabled=False):  # else it would meet the other rank before it begins
            begun = None if rank() else x.redistribute(chunks(1, 1, 0), async_op=True)
        assert "out of step" in caught_by(lambda: x.softmax(0))
        if begun is not None:
            with pytest.raises(TransferError, match="was given up: begin it again"):
                begun.wait()
        assert torch.equal(x.full_tensor(), PLAIN)


@ranks(2)
def test_a_transfer_that_was_begun_before_an_error_ends_or_is_given_up() -> None:
    """If all of it was sent, it comes; rounds that were not begun do not."""
    x = shard_tensor(PLAIN, chunks(0, 0, 1))
    with impatient():
        for rounds in (None, 8):
            begun = x.redistribute(chunks(1, 1, 0), async_op=True, max_bytes=rounds)
            assert "out of step" in caught_by(lambda: x @ x.t() if rank() else x.softmax(0))
            if rounds is None:
                with slow_messages():
                    assert torch.equal(begun.wait().full_tensor(), PLAIN)
            else:
                with pytest.raises(TransferError, match="was given up: begin it again"):
                    begun.wait()
            assert torch.equal(x.redistribute(chunks(1, 1, 0), max_bytes=rounds).full_tensor(), PLAIN)


@ranks(2)
def test_an_error_right_after_a_transfer_was_begun_keeps_nothing_of_it_back() -> None:
    """It is of one rank, in a call that is not in its history yet: the transfer comes on all ranks."""
    x, wrong = shard_tensor(PLAIN, chunks(0, 0, 1)), dict[str, Any](wrong=1) if rank() else {}
    with impatient():
        begun = x.redistribute(chunks(1, 1, 0), async_op=True)
        with pytest.raises(TypeError, match="wrong"):
            x.softmax(0, **wrong)
        shardwise.check()
        with slow_messages():
            assert torch.equal(begun.wait().full_tensor(), PLAIN)


class NoMemoryToSend(TaggedMessages):
    """Messages of a rank that has no memory to send any."""

    def send(self, *_: Any) -> None:
        """Never."""
        raise MemoryError("no memory")


@ranks(2)
def test_a_transfer_that_another_rank_could_not_send_is_given_up() -> None:
    """It has failed before its history knew of the transfer, or afterwards."""
    x = shard_tensor(PLAIN, chunks(0, 0, 1))
    for module, name, fails in ((all_to_all, "fits", NoMemoryToSend.send), (wire, "TaggedMessages", NoMemoryToSend)):
        with impatient():
            with pytest.MonkeyPatch.context() as patch, no_memory() if rank() else nullcontext():
                if rank():
                    patch.setattr(module, name, fails)
                begun = x.redistribute(chunks(1, 1, 0), async_op=True)
            if not rank():
                with no_memory():
                    x.full_tensor()
                with pytest.raises(TransferError, match="was given up: begin it again"):
                    begun.wait()
            assert torch.equal(x.full_tensor(), PLAIN)


def no_memory() -> Any:
    """Expects that error, of whatever rank."""
    return pytest.raises(MemoryError, match="no memory")


@ranks(2)
def test_a_transfer_that_was_begun_more_calls_ago_than_are_kept() -> None:
    """It comes if all ranks have begun it, and is given up if one of them has not."""
    x = shard_tensor(PLAIN, chunks(0, 0, 1))
    with impatient():
        for everywhere in (True, False):
            with shardwise.validation(enabled=False):  # else it would meet the other rank before it begins
                begun = x.redistribute(chunks(1, 1, 0), async_op=True) if everywhere or not rank() else None
            for _ in range(KEPT + 1):
                record_call(world(), CallFingerprint({"op": "an op that sends nothing"}))
            assert "out of step" in caught_by(lambda: x @ x.t() if rank() else x.softmax(0))
            if everywhere:
                with slow_messages():
                    assert torch.equal(begun.wait().full_tensor(), PLAIN)
            elif begun is not None:
                with pytest.raises(TransferError, match="was given up: begin it again"):
                    begun.wait()
            assert torch.equal(x.full_tensor(), PLAIN)


@ranks(2)
def test_a_sum_in_two_exchanges_that_was_begun_before_an_error_is_given_up() -> None:
    """No rank counts on the second exchange, which the others may not begin."""
    x, said = shard_tensor(PLAIN, chunks(0, 0, 1)), CallFingerprint({"verb": "a sum"})
    whole = shardwise.ReplicatedShardingSpec(["rank:0/cpu", "rank:1/cpu"]).layout(PLAIN.shape)
    holding = all_reduce.holding_of(whole, rank(), 2)
    with impatient(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(all_reduce, "AT_ONCE", 0)
        for goes_ahead in (False, True):
            begun = all_reduce.AllReduce(holding, [PLAIN], world(), dtype=PLAIN.dtype, said=said)
            if goes_ahead:
                begun.advance()
            assert "out of step" in caught_by(lambda: x @ x.t() if rank() else x.softmax(0))
            with slow_messages(), pytest.raises(TransferError, match="was given up: begin it again"):
                begun.wait()
            assert torch.equal(x.full_tensor(), PLAIN)


# Messages -------------------------------------------------------------------------------------------------------------


@ranks(WORLD)
def test_ops_backwards_and_steps_send_data_only() -> None:
    """The same messages as without any checks; strict ones send a header to each of the others besides."""
    x = shard_tensor(PLAIN, ROWS)
    calls: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
        "an op": (lambda: x, lambda given: given.softmax(0)),
        "a product": (lambda: x, lambda given: given @ given.t()),
        "a gathered op": (lambda: x, lambda given: given.flatten().sort()),
        "copy_": (lambda: shard_tensor(PLAIN, COLUMNS), lambda given: given.copy_(x)),
        "a backward": (recorded, backward_of),
        "a step": (trained, lambda given: given[1].step()),
    }
    for name, (made, call) in calls.items():
        data: list[list[int]] = []
        for checks in ({"enabled": False}, {}, {"strict": True}):
            given = made()
            with shardwise.validation(**checks):
                data.append(sent(lambda: call(given)))  # noqa: B023
        assert data[0] == data[1], name
        headers = [size for size in data[2] if size == HEADER]
        assert len(data[2]) == len(data[0]) + len(headers), name
        assert bool(headers) == (name != "a step"), name


@ranks(2)
def test_waits_that_were_given_up_end_before_the_process_does() -> None:
    """Else their threads would come back while Python ends, and abort it."""
    group = dist.new_group([0, 1])
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1), process_group=group)
    pending = group_state(group).message_threads.pending
    with impatient(), pytest.raises(RankMismatchError, match="out of step"):
        (normed if rank() else product)(tensor)
    assert pending
    dist.barrier()
    drop(pending)  # which breaks the connections of this group
    assert not pending
