"""Ways to cut every parameter of a model: by rows, by columns, by tensor parallelism, into uneven boxes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from tests.cases import places
from tests.models.zoo import ZOO
from torch import nn

from shardwise import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ReplicatedShardingSpec,
    ShardingPlan,
    ShardingSpec,
    ShardMetadata,
)
from shardwise.nn import plans

Cut = Callable[[str, torch.Tensor], ShardingSpec | None]


def everywhere() -> list[str]:
    """A place on every rank, on the device that tensors are made on."""
    return places(*range(dist.get_world_size()), device=str(torch.get_default_device()))


def rows(name: str, parameter: torch.Tensor) -> ShardingSpec | None:
    """The first dim in chunks."""
    return ChunkShardingSpec(0, everywhere()) if parameter.ndim else None


def columns(name: str, parameter: torch.Tensor) -> ShardingSpec | None:
    """The last dim in chunks."""
    return ChunkShardingSpec(-1, everywhere()) if parameter.ndim else None


def uneven(name: str, parameter: torch.Tensor) -> ShardingSpec | None:
    """The last rank has the first third of the rows; of the rest, the columns are cut in two, on other ranks."""
    if not parameter.ndim or not parameter.numel():
        return None
    world, size = dist.get_world_size(), list(parameter.shape)
    at = size[0] // 3
    boxes = [([0] * len(size), [at, *size[1:]], world - 1)]
    rest, begin = [size[0] - at, *size[1:]], [at] + [0] * (len(size) - 1)
    if len(size) == 1:
        boxes.append((begin, rest, 0))
    else:
        left = size[-1] // 4
        boxes.append((begin, [*rest[:-1], left], world - 1))
        boxes.append(([*begin[:-1], left], [*rest[:-1], size[-1] - left], 0))
    return EnumerableShardingSpec([ShardMetadata(o, s, everywhere()[r]) for o, s, r in boxes])


def tensor_parallel(model: str) -> Cut:
    """Pairs of layers, the first cut along its outputs and the second along its inputs; tables of words by rows."""
    first, second = ZOO[model].rows, ZOO[model].columns

    def cut(name: str, parameter: torch.Tensor) -> ShardingSpec | None:
        module, _, kind = name.rpartition(".")
        if any(module.endswith(f".{end}") or module == end for end in first):
            return ChunkShardingSpec(0, everywhere())
        if any(module.endswith(f".{end}") for end in second) and kind == "weight":
            turned = model == "GPT-2"  # whose layers have their weights the other way round
            return ChunkShardingSpec(0 if turned else 1, everywhere())
        if "embed" in name or "wte" in name or "shared" in name or "experts" in name:
            return ChunkShardingSpec(0, everywhere()) if parameter.ndim > 1 else None
        return ReplicatedShardingSpec(everywhere()) if "norm" in name else None

    return cut


def planned(model: nn.Module) -> Cut:
    """The plan that the library makes for tensor parallelism."""
    specs = plans.tensor_parallel(model).plan
    return lambda name, _: specs.get(name)


def plan_of(model: nn.Module, cut: Cut) -> ShardingPlan:
    """The plan that cuts each parameter so; what `cut` gives no spec for stays plain."""
    specs = {name: cut(name, parameter) for name, parameter in model.named_parameters()}
    return ShardingPlan({name: spec for name, spec in specs.items() if spec is not None})
