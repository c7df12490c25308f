"""What shares memory, what does not, and who may write: as with plain tensors, or refused on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cases import ALL, CUTS, PLAIN, SIZE, assert_close, assert_holds, chunks, holds
from torch import nn

import shardwise
from shardwise import ReplicatedShardingSpec
from shardwise.errors import ViewWriteError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks


@ranks(2)
def test_writing_through_a_view() -> None:
    """Reaches the tensor where the shards stay; where they had to move for the view, it is refused."""
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1))
    expected = PLAIN.clone()
    for one in (tensor, expected):
        one[2:5, 1].mul_(10)
        one.t()[0].zero_()
        one.view(7, 2, 3)[:, 1] = 5.0
        one[0] = torch.arange(6.0)
    assert holds(tensor, expected)
    writes: list[Callable[[Any], Any]] = [
        lambda moved: moved[1:].neg_(),
        lambda moved: moved.zero_(),
        lambda moved: moved.normal_(),
        lambda moved: moved.copy_(torch.zeros(3, 14)),
        lambda moved: moved.copy_(moved.clone()),
        lambda moved: moved.__setitem__(0, 100.0),
        lambda moved: torch.add(moved, 1, out=moved),
        lambda moved: torch._foreach_add_([moved], 1.0),
    ]
    for write in writes:
        with pytest.raises(ViewWriteError, match="would be a view"):
            write(tensor.view(3, 14))
    assert holds(tensor, expected)
    tensor.reshape(3, 14).add_(1)  # may be a copy, as anywhere


@ranks(2)
def test_what_is_new_shares_no_memory() -> None:
    """cat, also of one tensor, and the ops that say that they copy."""
    tensor, plain = shard_tensor(PLAIN, chunks(0, 0, 1)), torch.ones(2, 6)
    torch.cat([tensor, plain]).zero_()
    torch.cat([tensor]).zero_()
    torch.slice_copy(tensor, 0, 0, 2).zero_()
    torch.select_copy(tensor, 0, 1).zero_()
    torch.squeeze_copy(tensor).zero_()
    torch.view_copy(tensor, (7, 6)).zero_()
    assert holds(tensor, PLAIN)
    assert plain.all()


@ranks(2)
def test_reading_and_writing_the_same_memory() -> None:
    """Values are read before they are written."""
    square = torch.arange(16.0).reshape(4, 4)
    tensor = shard_tensor(square, chunks(0, 0, 1))
    tensor.copy_(tensor.t())
    assert holds(tensor, square.t())
    line = shard_tensor(torch.arange(4.0), chunks(0, 0, 1))
    line[1:].copy_(line[:-1])
    assert line.full_tensor().tolist() == [0, 0, 1, 2]


def _at_indices(x: Any, w: Any) -> None:
    x[torch.tensor([4, 0])] = w[:2]
    x[:, torch.tensor([True, False, False, True, False, False])] = w[:, 1:3]
    x[torch.tensor([1, 3]), torch.tensor([2, 5])] = w[0, 0]


def _repeated(x: Any, w: Any) -> None:
    x[1:6:2] = w[3]
    x[:, 4:] = w[:, :1]
    x[5:, 1:2] = w[2, 2]
    x[2:2] = w[:0]
    x[:6, :3] = w.t()[:, :3]


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "at indices and masks": _at_indices,
    "repeated, stepped, turned": _repeated,
    "a row": lambda x, w: x.__setitem__(0, w[0]),
    "columns": lambda x, w: x[:, 4:].copy_(w[:, :2]),
    "a row of columns": lambda x, w: x[:, :3][1:2].copy_(w[1:2, :3]),
    "a part of a turned one": lambda x, w: x.t()[2:3].copy_(w.t()[2:3]),
    "in place": lambda x, w: x[2:5].mul_(w[2:5]),
    "a number": lambda x, w: x[6].add_(w[6, 0]),
    "all of a turned one": lambda x, w: x.t().copy_(w.t()),
    "through a flat view": lambda x, w: x.view(-1)[:5].add_(w[0, :5]),
}


@pytest.mark.parametrize("write", WRITES)
@ranks(4)
def test_values_with_a_graph_are_written_into_a_part(write: str) -> None:
    """Into every kind of layout, from the same, another or none: values and gradients are as if it were plain."""
    values = PLAIN.double() / 7
    weights = torch.rand(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaf, start = weights.clone().requires_grad_(), values.clone().requires_grad_()
    plain = start * 2
    WRITES[write](plain, leaf)
    (plain * weights).sum().backward()
    for spec in ["chunk dim 0"] if write == "through a flat view" else CUTS:  # of other layouts it is a copy
        for given in (ALL[spec], ALL["chunk dim -1"], None):
            first = shard_tensor(values, ALL[spec]).requires_grad_()
            value = weights.clone() if given is None else shard_tensor(weights, given)
            value.requires_grad_()
            made = first * 2
            WRITES[write](made, value)
            assert made.requires_grad
            if given is None:  # the rank that holds a row, and those that do not
                assert all(made[k : k + 1].requires_grad for k in range(SIZE[0]))
            assert_holds(made, plain)
            (made * weights).sum().backward()
            assert_holds(first.grad, start.grad)
            assert_holds(value.grad, leaf.grad)


def _halves(x: Any) -> Any:
    a, b = x.unsafe_chunk(2, 1)
    return a.sigmoid_() * b.tanh_()


def _rows(x: Any) -> Any:
    a, b, c = x.unsafe_split_with_sizes([1, 2, 4], 0)
    return torch.cat([a.sigmoid_() * b.tanh_(), c.exp_()])


# Each with what it comes to without a write: of views, a plain tensor refuses the backward of some of them.
CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "parts that are no views": (_halves, lambda x: x[:, :3].sigmoid() * x[:, 3:].tanh()),
    "uneven parts that are no views": (
        _rows,
        lambda x: torch.cat([x[:1].sigmoid() * x[1:3].tanh(), x[3:].exp()]),
    ),
    "two views": (
        lambda x: x[:, :3].sigmoid_() * x[:, 3:].tanh_(),
        lambda x: x[:, :3].sigmoid() * x[:, 3:].tanh(),
    ),
    "one view by another": (
        lambda x: (x[1:3].tanh_(), x[0].mul_(x[1]), x[1:].add_(x[0]))[2],
        lambda x: torch.cat([x[1:3].tanh(), x[3:]]) + x[0] * x[1].tanh(),
    ),
    "not element by element": (lambda x: x.cumprod_(0)[2:].cumprod_(1), lambda x: x.cumprod(0)[2:].cumprod(1)),
}


@ranks(4)
def test_parts_of_one_tensor_are_changed_in_place() -> None:
    """A change of one part is no change of another to autograd, whichever of them are in one shard."""
    values = torch.linspace(-1, 2, 42, dtype=torch.float64).reshape(SIZE)
    for name, (change, without) in CHANGES.items():
        leaf = values.clone().requires_grad_()
        expected = without(leaf * 2)
        expected.square().sum().backward()
        for spec, given in ALL.items():
            sharded = shard_tensor(values, given).requires_grad_()
            found = change(sharded * 2)
            found.square().sum().backward()
            assert_close(found.detach().full_tensor(), expected.detach(), f"{name}, {spec}")
            assert_close(sharded.grad.full_tensor(), leaf.grad, f"{name}, {spec}")


@ranks(2)
def test_a_view_of_a_leaf_is_not_written_into() -> None:
    """On any rank, also on one that holds nothing of the part."""
    leaf = shard_tensor(PLAIN, chunks(0, 0, 1)).requires_grad_()
    for write in (lambda: leaf[0].zero_(), lambda: leaf.t()[:, :1].mul_(2), lambda: leaf[0].copy_(leaf[1].detach())):
        with pytest.raises(RuntimeError, match="leaf"):
            write()
    with torch.no_grad():
        leaf[0].zero_()
    assert not leaf.full_tensor()[0].any()


@ranks(2)
def test_the_backward_of_a_part_of_joined_tensors() -> None:
    """Reaches all ranks, whichever tensor their part came from."""
    weight = torch.ones(1, requires_grad=True)
    other = shard_tensor(torch.arange(4.0), chunks(0, 0, 1)).requires_grad_()
    joined = torch.cat([shard_tensor(torch.arange(4.0), chunks(0, 0, 1)) * weight, other])
    joined[3:5].sum().backward()
    assert weight.grad.item() == 3
    assert other.grad.full_tensor().tolist() == [1, 0, 0, 0]


@ranks(3)
def test_every_way_from_a_replicated_leaf_gives_each_replica_the_gradient() -> None:
    """Also with a rank that holds none."""
    spec = ReplicatedShardingSpec(["rank:0/cpu", "rank:1/cpu"])
    ways: dict[str, Callable[[Any], Any]] = {
        "op": lambda w: w * 2,
        "in place": lambda w: torch.ones_like(w).mul_(w) * 2,
        "redistribute": lambda w: w.redistribute(spec) * 2,
        "copy": lambda w: torch.zeros_like(w).copy_(w) * 2,
        "clone": lambda w: w.clone() * 2,
        "foreach": lambda w: torch._foreach_mul([w], 2.0)[0],
        "another dtype": lambda w: w.double() * 2,
        "part": lambda w: torch.cat([w[:2] * 2, w[2:] * 2]),
    }
    for name, way in ways.items():
        weight = shard_tensor(torch.arange(3.0), spec).requires_grad_()
        way(weight).sum().backward()
        assert weight.grad is not None, name
        for shard in weight.grad.local_shards():
            assert shard.tensor.tolist() == [2, 2, 2], name
    fresh = torch.zeros_like(weight).requires_grad_()
    assert fresh.is_leaf
    (fresh * 2).sum().backward()
    assert fresh.grad is not None


@ranks(3)
def test_foreach_on_a_rank_without_shards() -> None:
    """Says of its results what the others say."""
    (halves,) = torch._foreach_div([shard_tensor(torch.arange(4), chunks(0, 0, 1))], 2.0)
    assert halves.dtype == torch.float32
    assert halves.sum().item() == 3


@ranks(2)
def test_numbers_in_short_floats_do_not_overflow_on_their_way() -> None:
    """Means and variances of parts are added up in float32."""
    twos = shard_tensor(torch.full((100000,), 2.0).half(), chunks(0, 0, 1))
    assert twos.mean().item() == 2
    assert nn.functional.mse_loss(twos, torch.zeros_like(twos)).item() == 4
    waves = shard_tensor(((torch.arange(200000) % 2) * 2).half(), chunks(0, 0, 1))
    assert waves.var().item() == pytest.approx(1)


@ranks(2)
def test_gradients_where_nothing_varies_or_all_is_masked() -> None:
    """std of equal values, logsumexp of a part that is all -inf: what the plain tensor says, and no NaN."""
    masked = torch.arange(8.0, dtype=torch.float64).reshape(2, 4)
    masked[0, :2] = -torch.inf
    for plain, function in (
        (torch.ones(4, 2, dtype=torch.float64), lambda t: t.std(0)),
        (masked, lambda t: t.logsumexp(1)),
    ):
        leaf, tensor = plain.clone().requires_grad_(), shard_tensor(plain, chunks(1, 0, 1)).requires_grad_()
        turned = shard_tensor(plain, chunks(0, 0, 1)).requires_grad_()
        function(leaf).sum().backward()
        for one in (tensor, turned):
            function(one).sum().backward()
            assert_close(one.grad.full_tensor(), leaf.grad)


@ranks(2)
def test_batch_norm_keeps_its_running_statistics_alike() -> None:
    """On every rank those of the whole batch."""
    batch = torch.arange(48.0, dtype=torch.float64).reshape(6, 8).sin()
    plain, norm = nn.BatchNorm1d(8).double(), nn.BatchNorm1d(8).double()
    expected = plain(batch)
    found = norm(shard_tensor(batch, chunks(0, 0, 1)))
    assert_close(found.full_tensor(), expected)
    assert_close(norm.running_mean, plain.running_mean)
    assert_close(norm.running_var, plain.running_var)
    norm.eval()
    plain.eval()
    assert_close(norm(shard_tensor(batch, chunks(0, 0, 1))).full_tensor(), plain(batch))


@ranks(2)
def test_values_with_a_graph_are_written_into_a_part_of_every_shard() -> None:
    """All ranks hold some of it, and record it: each value gets its gradient, what was overwritten gets none."""
    weight = torch.ones(7, 2, requires_grad=True)
    other = shard_tensor(PLAIN, chunks(0, 0, 1)).requires_grad_()
    tensor = other * 2
    tensor[:, :2] = weight * 3
    tensor[:, 2:4].copy_(shard_tensor(PLAIN, chunks(1, 1, 0))[:, 2:4])
    tensor.sum().backward()
    assert torch.equal(weight.grad, torch.full((7, 2), 3.0))
    assert holds(other.grad, torch.tensor([0.0, 0, 0, 0, 2, 2]).expand(7, 6))


@ranks(2)
def test_new_tensors_are_cut_as_the_one_they_come_of() -> None:
    """Where only dims differ that are not cut; else they are whole on every rank within the budget, or in chunks."""
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1))
    assert tensor.new_zeros(7, 9).local_tensor().shape[1] == 9
    assert tensor.new_zeros(7, 9).sharding_spec() == tensor.sharding_spec()
    assert tensor.new_ones(8, 9).local_tensor().shape == (8, 9)
    with shardwise.gather_budget(0):
        assert tensor.new_ones(8, 9).local_tensor().numel() < 72
        assert torch.equal(tensor.new_full((8, 9), 3.0).full_tensor(), torch.full((8, 9), 3.0))
