"""Ops that cannot be computed say so, on every rank alike; ops that must agree find out who differs."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, PLAIN, SIZE, chunks, holds
from torch._decomp import decomposition_table

import shardwise
from shardwise.errors import ProcessGroupError, RankMismatchError, UnsupportedOpError
from shardwise.settings import own_batches
from shardwise.tensor import shard_tensor
from shardwise.tensor.partial import PartialTensor, ReplicatedTensor
from shardwise.testing import ranks


@ranks(2)
def test_an_op_beyond_the_budget_is_refused() -> None:
    """The error names the op, the bytes and the way out, which works."""
    square = torch.eye(6) * 2
    tensor = shard_tensor(square, chunks(0, 0, 1))
    with shardwise.gather_budget(143), pytest.raises(UnsupportedOpError, match=r"gather 144 bytes.*gather_budget\(144"):
        torch.linalg.inv(tensor)
    with shardwise.gather_budget(144):
        assert torch.equal(torch.linalg.inv(tensor).full_tensor(), torch.linalg.inv(square))


@ranks(2)
def test_an_attribute_that_sharded_tensors_lack() -> None:
    """Is an AttributeError, as hasattr wants it."""
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1))
    assert not hasattr(tensor, "no_such_thing")


@ranks(2)
def test_the_wrong_size_raises_as_it_does_on_plain_tensors() -> None:
    """On every rank, before anything is sent."""
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1))
    with pytest.raises(RuntimeError, match=r"same reduction dim|cannot be multiplied"):
        torch.mm(tensor, tensor)
    with pytest.raises(RuntimeError, match="broadcast"):
        tensor + torch.ones(5)
    with pytest.raises(IndexError):
        tensor[9]


@ranks(4)
def test_an_operator_refuses_what_is_no_operand() -> None:
    """In place, too, where the tensor would else be given back as if nothing was wrong; and it asks the other side."""

    class Other:
        def __radd__(self, tensor: object) -> str:
            return "asked"

    for spec in ALL.values():
        tensor = shard_tensor(PLAIN, spec)
        for name in ("add", "iadd", "imul", "isub", "ipow", "itruediv"):
            with pytest.raises(TypeError, match="unsupported operand"):
                getattr(operator, name)(tensor, None)
        assert operator.iadd(tensor, Other()) == operator.add(tensor, Other()) == "asked"
        assert holds(tensor, PLAIN)


@ranks(4)
def test_tensors_of_different_groups_do_not_mix() -> None:
    """In ops and comparisons alike."""
    group = dist.new_group([0, 1, 2, 3])
    one = shard_tensor(PLAIN, ALL["chunk dim 0"])
    other = shard_tensor(PLAIN, ALL["chunk dim -1"], process_group=group)
    for op in (torch.add, torch.equal, torch.allclose, torch.mul):
        with pytest.raises(ProcessGroupError, match="All distributed tensors should use the same ProcessGroup"):
            op(one, other)


@ranks(2)
def test_ranks_that_compute_different_things_find_out() -> None:
    """Where data moves, a rank that waits finds out what the others are in."""
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1))
    op = torch.softmax if dist.get_rank() else torch.log_softmax
    with pytest.raises(RankMismatchError, match=r"rank 0 is in aten\._log_softmax.*rank 1 in aten\._softmax"):
        op(tensor, 0)


@ranks(2)
def test_comparisons_give_every_rank_one_answer() -> None:
    """equal, allclose and isclose, with sharded and plain tensors, of equal or different layouts."""
    one, other = shard_tensor(PLAIN, chunks(0, 0, 1)), shard_tensor(PLAIN, chunks(1, 1, 0))
    assert torch.equal(one, other)
    assert torch.equal(one, PLAIN)
    assert not torch.equal(one, other + (PLAIN == 41))
    assert not torch.equal(one, one[:3])
    assert torch.allclose(one, other + 1e-9)
    assert not torch.allclose(one, other + 0.1)
    assert holds(torch.isclose(one, other), torch.ones(SIZE, dtype=torch.bool))
    assert one.sum().item() == PLAIN.sum().item()
    assert bool(one.max() == 41)


@ranks(4)
def test_a_partial_tensor_is_reduced_into_what_is_asked_for() -> None:
    """Into any spec, differentiably; by an op; and by other reductions than the sum."""
    rank = dist.get_rank()
    mine = (PLAIN * (rank + 1)).requires_grad_()
    partial = PartialTensor(mine)
    for name, spec in ALL.items():
        assert holds(partial.reshard(spec), PLAIN * 10), name
    found = partial.redistribute(ALL["uneven grid"])
    found.backward(shard_tensor(PLAIN, ALL["uneven grid"]))
    assert torch.equal(mine.grad, PLAIN)
    assert torch.equal((partial + 1).full_tensor(), PLAIN * 10 + 1)
    assert PartialTensor(torch.tensor(1.0)).full_tensor().item() == 4
    highest = PartialTensor(PLAIN * (rank + 1), reduce_op=dist.ReduceOp.MAX)
    assert torch.equal(highest.full_tensor(), PLAIN * 4)
    assert repr(highest) == "PartialTensor((7, 6), torch.float32, a max over 4 ranks)"


@ranks(2)
def test_a_replicated_tensor_keeps_its_promise_or_raises() -> None:
    """Validated on every rank; in an op with a sharded tensor it is the same operand on all ranks."""
    same = ReplicatedTensor(PLAIN.clone())
    assert same.validate()
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1))
    assert holds(tensor + same, PLAIN * 2)
    with pytest.raises(ValueError, match="have different values on rank 0 and 1"):
        ReplicatedTensor(PLAIN + dist.get_rank()).validate()


@ranks(2)
def test_what_is_computed_with_replicated_tensors() -> None:
    """Is replicated, with whatever else. In the old system, only if everything that the function is given is."""
    group = dist.new_group([0, 1])
    same = ReplicatedTensor(PLAIN.clone(), group)
    for setting, kind in ((False, ReplicatedTensor), (True, torch.Tensor)):
        with own_batches(setting):
            for result in (same + PLAIN, PLAIN + same, torch.cat([same, PLAIN]), same + 2, 2 * same, *same.split(3)):
                assert type(result) is kind
            for result in (same + same, torch.matmul(same, same.t()), -same, torch.add(same, other=same)):
                assert type(result) is ReplicatedTensor
                assert result._process_group is group
                assert result.validate()
            assert same.shape == SIZE
            assert type(same.add_(PLAIN * 0)) is ReplicatedTensor
    with pytest.raises(RuntimeError, match="must be in the same process group"):
        same + ReplicatedTensor(PLAIN)


@ranks(2)
def test_autograd_grad_gives_sharded_gradients() -> None:
    """Of sharded and plain inputs, and again of the gradients."""
    x = shard_tensor(PLAIN, chunks(0, 1, 1)).requires_grad_()
    w = torch.ones(6, requires_grad=True)
    loss = (x**2 * w).sum()
    gx, gw = torch.autograd.grad(loss, [x, w], create_graph=True)
    assert torch.equal(gx.full_tensor().detach(), PLAIN * 2)
    assert torch.equal(gw.detach(), (PLAIN**2).sum(0))


@ranks(2)
def test_plain_operands_that_differ_between_ranks_are_found_out() -> None:
    """Where an op is computed on every rank: a draw that each rank made for itself, for example."""
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1))
    rows = torch.tensor([dist.get_rank()])
    with pytest.raises(RankMismatchError, match=r"setitem.*is a plain tensor"):
        tensor[rows, 0] = 0.0
    with shardwise.validation(values=False), pytest.raises(RankMismatchError, match="operand 1"):
        tensor[rows, 0] = 0.0


@ranks(2)
def test_arguments_that_differ_between_ranks_are_found_out() -> None:
    """Numbers and dims too, where data moves."""
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1))
    with pytest.raises(RankMismatchError, match="arguments"):
        tensor.roll(dist.get_rank() + 1, 0)


@ranks(2)
def test_a_value_that_is_sharded_fills() -> None:
    """As one number on every rank; and out= does not cast silently."""
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1))
    assert holds(tensor.clone().fill_(tensor.max()), torch.full(SIZE, 41.0))
    assert holds(torch.sub(other=tensor, input=tensor + 1), torch.ones(SIZE))
    with pytest.raises(ValueError, match="can't be cast"):
        torch.add(tensor, 0.25, out=torch.zeros_like(tensor, dtype=torch.int64))


@ranks(2)
def test_a_decomposition_that_comes_back_to_its_op_is_refused() -> None:
    """As what the op needs whole, not as a recursion without end."""
    tensor = shard_tensor(torch.eye(4), chunks(0, 0, 1))
    op = torch.ops.aten.cholesky_inverse.default
    decomposition_table[op] = lambda x, upper=False: torch.cholesky_inverse(x + 0, upper)
    try:
        with (
            shardwise.gather_budget(0),
            pytest.raises(UnsupportedOpError, match=r"cholesky_inverse.* whole"),
        ):
            torch.cholesky_inverse(tensor)
    finally:
        del decomposition_table[op]
