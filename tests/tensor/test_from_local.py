"""`from_local`: each rank's own tensor, joined where it lies."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.cases import assert_close, chunks, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import shardwise
from shardwise import ShardedTensor, errors, from_local
from shardwise.comm.group import tagged_messages
from shardwise.tensor import shard_tensor
from shardwise.tensor.partial import ReplicatedTensor
from shardwise.testing import ranks

SIZES = [2, 0, 3, 1]


def own(*size: int, seed: int = 0) -> torch.Tensor:
    """This rank's numbers, which no other rank has."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.rand(size, dtype=torch.float64, generator=generator)


@ranks(4)
def test_sizes_may_differ_along_any_dim() -> None:
    """In order of rank, empty parts too; the shard is the tensor that was given, and nothing else is allocated."""
    for dim in (0, 1, -1):
        mine = own(SIZES[dist.get_rank()], 5) if dim == 0 else own(5, SIZES[dist.get_rank()])
        made = from_local(mine, dim)
        everyone: list[Any] = [None] * 4
        dist.all_gather_object(everyone, mine)
        assert torch.equal(whole(made), torch.cat(everyone, dim))
        assert made.local_tensor() is mine


@ranks(4)
def test_sizes_that_are_known_need_no_message() -> None:
    """With ``sizes`` nothing travels; one that is wrong is said."""
    mine = own(SIZES[dist.get_rank()], 5)
    with mock.patch.object(tagged_messages.TaggedMessages, "send", side_effect=AssertionError("a message")):
        made = from_local(mine, sizes=SIZES)
    assert made.shape == (6, 5)
    assert made._layout == from_local(mine)._layout
    for wrong in ([1, 1, 1, 1, 2], [9, 9, 9, 9]):
        with pytest.raises(errors.PropertyError, match="does not fit: 4 parts are joined"):
            from_local(mine, sizes=wrong)


@ranks(4)
def test_gradients_come_back_to_each_rank() -> None:
    """Of a leaf, and of what was computed from one; as the part of the gradient of all batches together."""
    weight = torch.rand(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    leaf = own(SIZES[dist.get_rank()], 5).requires_grad_()
    for mine in (leaf, leaf * 2):
        leaf.grad = None
        (from_local(mine) @ shard_tensor(weight, chunks(1, 0, 1, 2, 3))).square().sum().backward()
        expected = 2 * (mine @ weight) @ weight.T * (1 if mine is leaf else 2)
        assert leaf.grad is not None
        assert_close(leaf.grad, expected.detach())
    assert from_local(leaf).is_leaf
    assert not from_local(leaf * 2).is_leaf
    assert from_local(leaf.detach().long()).dtype == torch.int64


@ranks(4)
def test_a_mesh_says_along_which_axis_ranks_differ() -> None:
    """Rows along one axis and the same along the other; blocks of a grid; all ranks in a row."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    row, column = divmod(dist.get_rank(), 2)
    values = torch.arange(30.0, dtype=torch.float64).reshape(5, 6)
    rows = values.split([2, 3])[row]
    made = from_local(rows, (0, None), mesh=mesh)
    assert made.shape == (5, 6)
    assert torch.equal(made.full_tensor(), values)
    assert made._layout.has_replicas
    block = rows.split([4, 2], 1)[column]
    assert torch.equal(from_local(block, (0, 1), mesh=mesh).full_tensor(), values)
    turned = values.split([4, 1])[column].split([1, 5], 1)[row]
    assert torch.equal(from_local(turned, (1, 0), mesh=mesh).full_tensor(), values)
    fours = torch.arange(8.0)[2 * dist.get_rank() :][:2]
    assert torch.equal(from_local(fours, mesh=mesh).full_tensor(), torch.arange(8.0))
    assert from_local(rows, (0, None), mesh=mesh, sizes=[2, 3])._layout == made._layout
    leaf = rows.clone().requires_grad_()
    (from_local(leaf, (0, None), mesh=mesh) * shard_tensor(values, chunks(1, 0, 1, 2, 3))).sum().backward()
    assert_close(leaf.grad, rows)  # whole, on every replica


@ranks(4)
def test_sub_groups_and_lines_of_a_mesh() -> None:
    """The ranks of the group, in its order; a rank outside of it is told."""
    group = dist.new_group([3, 1])
    if dist.get_rank() in (1, 3):
        made = from_local(own(1, 2), process_group=group)
        assert made.shape == (2, 2)
        assert made._process_group is group
        assert [place.rank for place in made._layout.places] == dist.get_process_group_ranks(group)
    else:
        with pytest.raises(errors.ProcessGroupError, match="this rank is not in the group"):
            from_local(own(1, 2), process_group=group)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    line = from_local(own(dist.get_rank() + 1), mesh=mesh["model"])
    assert line.shape == ((3,) if dist.get_rank() < 2 else (7,))
    with pytest.raises(errors.SpecError, match="2 dims, \\[0, None\\], for the 1 axes"):
        from_local(own(2), (0, None) if dist.get_rank() % 2 else 0, mesh=mesh["model"])  # a mistake of one of two


WRONG: dict[str, tuple[type[Exception], str]] = {
    "no dims": (errors.SpecError, "cannot join tensors of 0 dims along dim 0: give each a dim first"),
    "another size elsewhere": (
        errors.RankMismatchError,
        r"the same size along dim 1.*\[2, 5\] on rank 0, \[2, 6\] on rank",
    ),
    "another dtype": (errors.RankMismatchError, "dtype"),
    "another number of dims": (errors.RankMismatchError, "ndim"),
    "a list": (errors.PropertyError, "what from_local joins is a tensor, found list"),
    "sharded already": (errors.PropertyError, "what from_local joins is a plain tensor"),
    "a gradient on some ranks": (errors.RankMismatchError, "requires_grad"),
}


@pytest.mark.parametrize("mistake", WRONG)
@ranks(2)
def test_a_mistake_of_one_rank_stops_all(mistake: str) -> None:
    """Every rank raises the same error, and the next call is in step again."""
    kind, message = WRONG[mistake]
    found: Any = torch.ones(2, 5)
    if dist.get_rank() == 1:
        found = {
            "no dims": torch.ones(()),
            "another size elsewhere": torch.ones(2, 6),
            "another dtype": torch.ones(2, 5).double(),
            "another number of dims": torch.ones(2, 5, 1),
            "a list": [1],
            "sharded already": shardwise.tensor.ShardedTensorBase.__new__(shardwise.tensor.ShardedTensorBase),
            "a gradient on some ranks": torch.ones(2, 5, requires_grad=True),
        }[mistake]
    if mistake == "sharded already":
        found = shardwise.zeros(chunks(0, 0, 1), 4, 5)
    with pytest.raises(kind, match=message):
        from_local(found)
    assert from_local(torch.ones(2, 5)).shape == (4, 5)


@ranks(3)
def test_a_model_on_a_joined_batch_and_on_the_whole_batch() -> None:
    """The same loss and gradients as the plain model, whatever is sharded: adding to a plan never changes a result."""
    torch.manual_seed(0)
    batch = torch.rand(7, 6, dtype=torch.float64)
    mine = batch.split([3, 0, 4])[dist.get_rank()]
    plain = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 4)).double()
    plain(batch).square().mean().backward()
    names = [name for name, _ in plain.named_parameters()]
    for count in range(1, len(names) + 1):
        for x in (batch, from_local(mine), ReplicatedTensor(batch)):
            twin = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 4)).double()
            twin.load_state_dict(plain.state_dict())
            for name in names[:count]:
                shardwise.nn.shard_parameter(twin, name, chunks(0, 0, 1, 2))
            made = twin(x)
            assert made.shape == (7, 4)
            made.square().mean().backward()
            for one, other in zip(twin.parameters(), plain.parameters(), strict=True):
                grad = one.grad.full_tensor() if isinstance(one, ShardedTensor) else one.grad
                assert_close(grad, other.grad)


@ranks(2)
def test_layers_fed_by_parameters_and_buffers_of_the_module() -> None:
    """Learned queries, and recurrent layers with their own zero state: one loss, not one for each rank."""
    torch.manual_seed(0)
    query, weight = torch.rand(3, 6, dtype=torch.float64), torch.rand(4, 6, dtype=torch.float64)
    plain_query, plain_weight = query.clone().requires_grad_(), weight.clone().requires_grad_()
    functional.linear(plain_query, plain_weight).square().sum().backward()
    for dim in (0, 1):
        leaf, sharded = query.clone().requires_grad_(), shard_tensor(weight, chunks(dim, 0, 1)).requires_grad_()
        functional.linear(leaf, sharded).square().sum().backward()
        assert_close(leaf.grad, plain_query.grad)
        assert_close(sharded.grad.full_tensor(), plain_weight.grad)
    for make in (nn.RNN, nn.GRU, nn.LSTM, lambda *a, **k: nn.LSTM(*a, proj_size=2, **k)):
        plain = make(6, 4, batch_first=True, dtype=torch.float64)
        twin = make(6, 4, batch_first=True, dtype=torch.float64)
        for one in plain.parameters():
            dist.broadcast(one.data, 0)
        twin.load_state_dict(plain.state_dict())
        x = torch.rand(5, 3, 6, dtype=torch.float64)
        plain(x)[0].square().sum().backward()
        for name in [name for name, _ in twin.named_parameters()]:
            shardwise.nn.shard_parameter(twin, name, chunks(0, 0, 1))
        for batch in (x, from_local(x.split([2, 3])[dist.get_rank()])):
            twin.zero_grad()
            made = twin(batch)[0]
            assert made.shape == plain(x)[0].shape
            made.square().sum().backward()
            for one, other in zip(twin.parameters(), plain.parameters(), strict=True):
                assert_close(one.grad.full_tensor(), other.grad)
