"""A rank that fails by itself, at any point: the others raise the same, or that the group is broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import chunks
from tests.comm.disagreement.given import impatient, looked_for

import shardwise
from shardwise import ShardedOptimizer
from shardwise.comm.agreement import meeting
from shardwise.comm.transfer import all_to_all
from shardwise.comm.transfer.rounds import Rounds
from shardwise.tensor import shard_tensor
from shardwise.tensor.dispatch import register_op, registry
from shardwise.testing import ranks

PLAIN = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)


def sharded(group: Any = None) -> Any:
    """Rows on the first two ranks."""
    return shard_tensor(PLAIN, chunks(0, 0, 1), process_group=group).requires_grad_()


def message_of(function: Callable[[], object]) -> str:
    """What a call raises."""
    with pytest.raises((RuntimeError, IndexError, ValueError, TypeError, AttributeError)) as caught:
        function()
    return str(caught.value)


@ranks(2)
def test_late_after_an_error() -> None:
    """A rank that caught its error and comes late is waited for, and nobody raises again."""
    x = sharded()
    with looked_for() as be_late:
        for everywhere in (True, False):
            bad = torch.full((4, 3), 99 if everywhere or dist.get_rank() == 1 else 0)
            if everywhere or dist.get_rank() == 1:
                message_of(lambda bad=bad: torch.gather(x, 1, shard_tensor(bad, chunks(0, 0, 1), src_rank=None)))
            if not everywhere and dist.get_rank() == 0:
                assert "found on rank 1" in message_of(x.full_tensor)
            if dist.get_rank() == 1:
                be_late()
            assert torch.equal(x.full_tensor().detach(), PLAIN)
            assert torch.equal((x + 1).sum(0).full_tensor().detach(), (PLAIN + 1).sum(0))


@ranks(2)
def test_no_memory_where_all_had_agreed() -> None:
    """The other rank does not wait for data that will not come; then they are in step again."""
    x = sharded()
    with impatient(), pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:

            def fails(*_: Any) -> None:
                raise torch.OutOfMemoryError("no memory\nat all")

            patch.setattr(all_to_all, "fits", fails)
            patch.setattr(Rounds, "_memory", fails)
        for rounds in (None, 8):
            found = message_of(lambda rounds=rounds: x.detach().redistribute(chunks(1, 1, 0), max_bytes=rounds))
            assert "no memory\nat all" in found
            assert ("found on rank 1" in found) == (dist.get_rank() == 0)
    assert torch.equal(x.full_tensor().detach(), PLAIN)


@ranks(2)
def test_hooks_and_functions_in_the_backward_of_a_plain_loss() -> None:
    """Which no sharded tensor is asked for."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return fails(grads[0])

    def fails(grad: Any) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("not on this rank")
        return grad

    def with_hook(x: Any) -> Any:
        y = x * 2
        y.register_hook(fails)
        return y

    for made in (with_hook, Fails.apply):
        x = sharded()
        loss = (made(x).redistribute(chunks(1, 0, 1)).redistribute(chunks(0, 0, 1)) * 2).full_tensor().sum()
        before = made(x * 3).redistribute(chunks(1, 0, 1)).full_tensor().sum()
        for one in (loss, (before + (x * 3).redistribute(chunks(1, 0, 1)).full_tensor()).sum()):
            found = message_of(lambda one=one, x=x: (one.backward(), x.full_tensor()))
            assert "not on this rank" in found
        assert torch.equal(x.full_tensor().detach(), PLAIN)


@ranks(2)
def test_a_part_of_a_sum_that_a_kernel_refuses() -> None:
    """A class that there is not, in the part of one rank: all raise at this call, and none gets a wrong sum."""
    logits = shard_tensor(torch.rand(4, 300, dtype=torch.float64), chunks(0, 0, 1))
    classes = torch.tensor([0, 1, 2, 999])
    for reduction in ("mean", "sum"):
        found = message_of(
            lambda reduction=reduction: torch.nn.functional.nll_loss(logits, classes, reduction=reduction)
        )
        assert "999" in found or "out of bounds" in found
        assert logits.full_tensor().shape == (4, 300)


@ranks(2)
def test_a_group_that_is_gone_hides_no_error() -> None:
    """The error is the one that torch raises."""
    group = dist.new_group([0, 1])
    x = sharded(group).detach()
    dist.destroy_process_group(group)
    assert "is invalid for input of size" in message_of(lambda: x.view(5, 5))


@ranks(2)
def test_what_only_one_kind_of_rank_can_find() -> None:
    """A kernel that there is not for a dtype, where one rank has all the data; a hook of an optimizer."""
    alone = shard_tensor(torch.ones(4, 2), chunks(0, 1)).to(torch.float8_e4m3fn)
    x = sharded()
    assert "not implemented for" in message_of(lambda: (torch.exp(alone), x.full_tensor()))
    optimizer = ShardedOptimizer({"x": x}, torch.optim.SGD, lr=0.1)

    def fails(*_: Any) -> None:
        if dist.get_rank() == 1:
            raise ValueError("not on this rank")

    optimizer.register_step_pre_hook(fails)
    (x * 2).sum().backward()
    assert "not on this rank" in message_of(lambda: (optimizer.step(), x.sum(0)))
    assert x.full_tensor().shape == (4, 3)


@ranks(2)
def test_a_mistake_of_one_rank_after_an_error_of_all() -> None:
    """Of which each has left word, as it could not know: the mistake is not taken for it, and all raise it."""
    x = sharded().detach()
    bad = shard_tensor(torch.full((4, 3), 99), chunks(0, 0, 1))
    for odd in (0, 1):
        message_of(lambda: torch.gather(x, 1, bad))
        dim = 7 if dist.get_rank() == odd else 0
        with impatient():
            assert f"found on rank {odd};" in message_of(lambda dim=dim: shard_tensor(PLAIN, chunks(dim, 0, 1)))
    assert torch.equal(x.full_tensor(), PLAIN)


@pytest.mark.parametrize("kind", [TypeError, AttributeError, KeyError])
@pytest.mark.parametrize("moves", [True, False])
@ranks(2)
def test_errors_of_any_kind_in_a_handler_of_the_user(kind: type[Exception], moves: bool) -> None:
    """The other rank, which waits in the same handler or in the next call, raises the same; then they are in step."""
    x = sharded().detach()

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        if dist.get_rank() == 1:
            raise kind("not on this rank")
        return args[0].full_tensor() if moves else args[0]

    with pytest.MonkeyPatch.context() as patch, impatient():
        patch.setattr(registry, "overrides", {})
        register_op(torch.special.i1)(handler)
        with pytest.raises(kind, match="not on this rank") as caught:
            x.sum(0) if torch.special.i1(x) is x else None
    assert ("found on rank 1" in str(caught.value)) == (dist.get_rank() == 0)
    assert torch.equal(x.full_tensor(), PLAIN)


@ranks(2)
def test_a_wrong_form_of_a_call_on_one_rank() -> None:
    """An argument that there is not, which torch finds: it is told as any other error."""
    x = sharded().detach()
    with impatient():
        wrong = {"wrong": 1} if dist.get_rank() == 1 else {}
        assert "wrong" in message_of(lambda: (x.sum(0, **wrong), x.full_tensor()))
    assert torch.equal(x.full_tensor(), PLAIN)


@ranks(3)
def test_a_wrong_form_of_a_call_on_all_ranks_costs_one_round_of_headers() -> None:
    """However often it is raised: before the ranks talk next they find that all have raised the same."""
    x = sharded().detach()
    for _ in range(3):
        with pytest.raises(TypeError, match="wrong"):
            x.sum(0, wrong=1)
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "SOON", 60.0)  # nobody looks into the store instead
        for _ in range(2):
            with shardwise.trace() as traced:
                assert torch.equal(x.full_tensor(), PLAIN)
            meetings = [one for one in traced.events if one.is_meeting]
            assert {one.sent for one in meetings} == {2 * 128}
            counts.append(len(meetings))
    assert counts[0] == 1 + counts[1]


@pytest.mark.parametrize("what", ["an id", "offsets"])
@ranks(2)
def test_a_rank_that_fails_alone_twice(what: str) -> None:
    """The others hear of both errors, and all go on together."""
    wrong = dist.get_rank() == 1
    table, given = sharded(), torch.tensor([0, 99 if wrong and what == "an id" else 1])
    ids: Any = shardwise.from_local(given, sizes=[2, 2])
    offsets = torch.tensor([0, 9, 3] if wrong and what == "offsets" else [0, 1, 3])
    with impatient():
        for _ in range(2):
            said = message_of(lambda: torch.nn.functional.embedding_bag(ids, table, offsets, mode="sum"))
            assert ("id 99" if what == "an id" else "offsets") in said
        for _ in range(2):
            assert torch.equal(table.full_tensor().detach(), PLAIN)
