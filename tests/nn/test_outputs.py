"""`reshard_output` and `collect_local_shard`: what a module gives, in another layout or as a plain local tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import SPECS, assert_close, chunks, holds
from tests.nn.models import whole
from torch import nn

from shardwise import ShardedTensor, ShardingPlan, from_local, shard_module
from shardwise.errors import LocalTensorError
from shardwise.nn import collect_local_shard, reshard_output, shard_parameter
from shardwise.tensor import shard_tensor
from shardwise.tensor.partial import PartialTensor
from shardwise.testing import ranks

ROWS, COLUMNS = chunks(0, 0, 1, 2, 3), chunks(1, 0, 1, 2, 3)


class Giving(nn.Module):
    """Gives what it is given."""

    def forward(self, value: Any) -> Any:
        """Nothing to compute."""
        return value


def numbers() -> torch.Tensor:
    """Of the size that the specs of the tests cut."""
    return torch.arange(42.0).reshape(7, 6)


@pytest.mark.parametrize("layout", SPECS)
@ranks(4)
def test_the_output_is_redistributed(layout: str) -> None:
    """From any layout to any other, with the gradient on its way back; plain values pass."""
    module = Giving()
    assert reshard_output(module, SPECS[layout]) is module
    given = shard_tensor(numbers(), COLUMNS).requires_grad_()
    found = module(given)
    assert found.sharding_spec() == SPECS[layout]
    assert given.sharding_spec() == COLUMNS
    assert holds(found, numbers())
    (found * found).sum().backward()
    assert holds(given.grad, 2 * numbers())
    assert module("plain") == "plain"


@ranks(4)
def test_partial_tensors_and_those_in_containers_are_redistributed() -> None:
    """Lists, tuples and dicts; what is sharded so already is the same object."""
    module = reshard_output(Giving(), ROWS)
    there = shard_tensor(numbers(), ROWS)
    found = module({"sum": PartialTensor(numbers()), "pair": (there, 1)})
    assert holds(found["sum"], 4 * numbers())
    assert found["pair"] == (there, 1)
    assert found["pair"][0] is there


@ranks(4)
def test_each_rank_gets_its_own_rows_back() -> None:
    """Own batches through a sharded layer, and back: as if each rank had the whole layer, gradients included."""
    torch.manual_seed(0)
    for spec in (ROWS, COLUMNS, chunks(0, 3, 1), SPECS["uneven, several per rank"]):
        layer, plain = nn.Linear(6, 7).double(), nn.Linear(6, 7).double()
        plain.load_state_dict(layer.state_dict())
        shard_parameter(layer, "weight", spec, src_rank=0)
        everyone = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        mine = everyone.chunk(4)[dist.get_rank()].clone().requires_grad_()
        found = collect_local_shard(reshard_output(layer, ROWS))(from_local(mine))
        assert type(found) is torch.Tensor
        expected = plain(everyone.requires_grad_())
        assert_close(found, expected.chunk(4)[dist.get_rank()])
        found.pow(2).sum().backward()
        expected.pow(2).sum().backward()
        assert_close(mine.grad, everyone.grad.chunk(4)[dist.get_rank()])
        assert_close(whole(layer.weight.grad), plain.weight.grad)


@ranks(4)
def test_a_dim_cut_into_ones_is_dropped() -> None:
    """Only that dim, and only if it is of size 1 here."""
    module = collect_local_shard(Giving())
    for size, dim, expected in (((4, 6), 0, (6,)), ((6, 4), -1, (6,)), ((4, 1), 0, (1,)), ((8, 1), 0, (2, 1))):
        plain = torch.arange(float(torch.Size(size).numel())).reshape(size)
        found = module(shard_tensor(plain, chunks(dim, 0, 1, 2, 3)))
        assert found.shape == expected
        assert torch.equal(found.flatten(), plain.chunk(4, dim)[dist.get_rank()].flatten())
    assert module(3) == 3
    first, rest = module((shard_tensor(numbers(), ROWS), [None]))
    assert (type(first), rest) == (torch.Tensor, [None])


@pytest.mark.parametrize("layout", ["chunk on two ranks", "chunk repeated", "all on one rank"])
@ranks(4)
def test_a_rank_with_no_or_several_shards_is_an_error_on_every_rank(layout: str) -> None:
    """Also on those that hold one, for they would wait for the others in the backward."""
    with pytest.raises(LocalTensorError, match=r"Number of shards: \d on rank \d, of the output of Giving"):
        collect_local_shard(Giving())(shard_tensor(numbers(), SPECS[layout]))


@ranks(2)
def test_what_is_no_spec_is_refused_at_once() -> None:
    """Not at the first forward."""
    with pytest.raises(ValueError, match="Expecting ShardingSpec but got"):
        reshard_output(Giving(), "rows")


@ranks(4)
def test_a_plan_changes_outputs_of_submodules_and_of_the_module_itself() -> None:
    """By path, by pattern, and "" for the module; redistributed first, then the local tensor."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    plan = ShardingPlan(
        plan={"*.weight": chunks(0, 0, 1, 2, 3)},
        output_plan={"[02]": ROWS, "": ROWS},
        return_local_tensor=["2"],
    )
    seen: list[Any] = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(output))
    found = shard_module(model, plan)(from_local(torch.ones(2, 6)))
    assert isinstance(seen[0], ShardedTensor)
    assert seen[0].sharding_spec() == ROWS
    assert type(found) is torch.Tensor
    assert found.shape == (2, 5)
