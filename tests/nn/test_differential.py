"""Beside the installed `torch.distributed._shard`, where it is right: the same shards, outputs and errors."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import assert_close, places
from torch import nn

import shardwise
from shardwise.testing import ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch.distributed._shard.api as old
    from torch.distributed._shard.sharder import Sharder as OldSharder
    from torch.distributed._shard.sharding_plan import ShardingPlan as OldPlan
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec as OldChunks


def both(dim: int, ranks_: list[int]) -> tuple[Any, Any]:
    """The same chunks in both systems."""
    return shardwise.ChunkShardingSpec(dim, places(*ranks_)), OldChunks(dim, list(places(*ranks_)))


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
@pytest.mark.parametrize("dim", [0, 1, -1])
@ranks(4)
def test_parameters_are_cut_alike(dim: int, order: list[int]) -> None:
    """Shards, metadata, kind, for even and uneven sizes, from any source."""
    warnings.simplefilter("ignore")
    for size, source in ((8, 0), (9, 2)):
        torch.manual_seed(dist.get_rank())
        ours = nn.Linear(size, size)
        theirs = copy.deepcopy(ours)
        spec, old_spec = both(dim, order)
        shardwise.nn.shard_parameter(ours, "weight", spec, src_rank=source)
        old.shard_parameter(theirs, "weight", old_spec, src_rank=source)
        assert torch.equal(ours.weight.local_tensor(), theirs.weight.local_tensor())
        assert str(ours.weight.metadata().shards_metadata) == str(theirs.weight.metadata().shards_metadata)
        assert isinstance(ours.weight, nn.Parameter)
        assert isinstance(theirs.weight, nn.Parameter)


class Giving(nn.Module):
    """Gives what it is given."""

    def forward(self, value: Any) -> Any:
        """Nothing to compute."""
        return value


@pytest.mark.parametrize("dims", [(0, 1), (1, 0)])
@ranks(4)
def test_outputs_are_changed_alike(dims: tuple[int, int]) -> None:
    """Redistributed, and collected into local tensors, with a dim of size 1 or without."""
    warnings.simplefilter("ignore")
    for size in ((4, 8), (8, 4), (8, 8)):
        plain = torch.arange(float(size[0] * size[1])).reshape(size)
        (first, old_first), (then, old_then) = both(dims[0], [0, 1, 2, 3]), both(dims[1], [0, 1, 2, 3])
        ours = shardwise.nn.collect_local_shard(shardwise.nn.reshard_output(Giving(), then))
        theirs = old._collect_local_shard(old._reshard_output(Giving(), old_then))
        found = ours(shardwise.tensor.shard_tensor(plain, first))
        expected = theirs(old._shard_tensor(plain, old_first))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dim", [0, 1])
@ranks(4)
def test_a_module_under_a_plan_computes_alike(dim: int) -> None:
    """Each rank's own ids through a sharded table; the old system no longer has linear layers."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8)).double()
    theirs = copy.deepcopy(ours)
    spec, old_spec = both(dim, [0, 1, 2, 3])
    shardwise.shard_module(ours, shardwise.ShardingPlan({"0.weight": spec}))
    old.shard_module(theirs, OldPlan({"0.weight": old_spec}))
    ids = torch.tensor([dist.get_rank(), 7, 3])
    with shardwise.settings.own_batches():
        assert_close(ours(ids), theirs(ids))


def outcome(function: Any, *args: Any) -> tuple[type[Exception], str] | None:
    """How a call ends."""
    try:
        function(*args)
    except Exception as error:
        return next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins"), str(error)
    return None


class Ours(shardwise.nn.sharding_plan.plan.Sharder):
    """Gives the same module."""

    def shard(self, module: nn.Module) -> nn.Module:
        """Nothing to do."""
        return module


class Theirs(OldSharder):
    """Gives the same module."""

    def shard(self, module: nn.Module) -> nn.Module:
        """Nothing to do."""
        return module


@ranks(2)
def test_plans_are_refused_alike() -> None:
    """By an error of the same builtin kind, or one that is also of that kind, with the words that callers look for."""
    warnings.simplefilter("ignore")
    spec, old_spec = both(0, [0, 1])
    words = {
        "supported to shard": ({"0.weight": 1.5}, None),
        "should not conflict with the submodule tree": ({"0": "sharder", "0.weight": "spec"}, None),
        "path must not be empty for custom sharder!": ({"": "sharder"}, None),
        "is supported as output_plan": ({}, {"0": 1.5}),
        "has no attribute": ({"9.weight": "spec"}, None),
    }
    for fragment, (plan, outputs) in words.items():
        ours = {name: {"sharder": Ours(), "spec": spec}.get(entry, entry) for name, entry in plan.items()}
        theirs = {name: {"sharder": Theirs(), "spec": old_spec}.get(entry, entry) for name, entry in plan.items()}
        expected = outcome(old.shard_module, nn.Sequential(nn.Linear(2, 2)), OldPlan(theirs, outputs))
        assert expected is not None
        assert fragment in expected[1]
        with pytest.raises(expected[0], match=fragment):
            shardwise.shard_module(nn.Sequential(nn.Linear(2, 2)), shardwise.ShardingPlan(ours, outputs))
