"""Plans that cut every parameter by one rule: along its longest dim, by rows, by columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardwise.layout.specs import ShardingSpec
from shardwise.nn.plans.rank_rows import DimPart, RankRows
from shardwise.nn.plans.reasons import PLAIN, Reason, ReasonedPlan
from shardwise.nn.sharding_plan import ModuleTree
from shardwise.nn.sharding_plan.steps import each_parameter

MOVES_ACTIVATIONS = (
    "ops compute where weights lie, and activations travel; shardwise.fully_shard gathers weights, as FSDP does"
)
Choice = Callable[[torch.Tensor], tuple[int | None, str]]  # the dim that is cut, or None, and why


def fully_sharded(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    weights: Sequence[float] | None = None,
    process_group: ProcessGroup | None = None,
) -> ReasonedPlan:
    """The plan that cuts every parameter along its longest dim, the first of several; those of fewer elements than
    ranks stay plain.

    Under this plan each op computes where the weights lie, and activations travel; `shardwise.fully_shard` gathers the
    weights for each rank's own samples instead.

    Parameters are shared out over all ranks of the group, or along a mesh of one axis; if that is an axis of a larger
    mesh, as in ``mesh["shard"]``, there are replicas along the others. ``weights`` has a number for each rank, and
    parts are in proportion. Every rank makes the same plan; nothing is sent::

        >>> import torch.distributed as dist
        >>> dist.init_process_group("fake", rank=0, world_size=3)
        >>> model = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 1))
        >>> print(fully_sharded(model, weights=[2, 1, 1]))
        parameter     size  cut                 why
        0.weight      8×16  dim 1 as 8 | 4 | 4  its longest dim
        *.bias  (2×)  8     dim 0 as 4 | 2 | 2  its longest dim
        1.weight      8     dim 0 as 4 | 2 | 2  its longest dim
        2.weight      1×8   dim 1 as 4 | 2 | 2  its longest dim
        2.bias        1     plain               fewer elements than ranks
        5 of 6 parameters are cut
        ops compute where weights lie, and activations travel; shardwise.fully_shard gathers weights, as FSDP does
        >>> dist.destroy_process_group()
    """
    rank_rows = RankRows.of(mesh, weights, process_group)

    def choice(parameter: torch.Tensor) -> tuple[int | None, str]:
        if parameter.numel() < len(rank_rows) or not parameter.ndim:
            return None, "fewer elements than ranks"
        return max(range(parameter.ndim), key=lambda dim: parameter.shape[dim]), "its longest dim"

    return replace(_plan(model, rank_rows, choice), note=MOVES_ACTIVATIONS)


def rows(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    weights: Sequence[float] | None = None,
    process_group: ProcessGroup | None = None,
) -> ReasonedPlan:
    """The plan that cuts every parameter along dim 0; scalars stay plain. For the rest, see `fully_sharded`."""
    rank_rows = RankRows.of(mesh, weights, process_group)
    return _plan(model, rank_rows, lambda parameter: (0, "its rows") if parameter.ndim else (None, "a scalar"))


def columns(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    weights: Sequence[float] | None = None,
    process_group: ProcessGroup | None = None,
) -> ReasonedPlan:
    """The plan that cuts every parameter along dim 1; those of fewer dims stay plain. For the rest, see
    `fully_sharded`."""
    rank_rows = RankRows.of(mesh, weights, process_group)
    return _plan(model, rank_rows, lambda one: (1, "its columns") if one.ndim > 1 else (None, "it has no columns"))


def _plan(model: nn.Module, rank_rows: RankRows, choice: Choice) -> ReasonedPlan:
    specs: dict[str, ShardingSpec] = {}
    reasons = []
    for name, parameter in each_parameter(ModuleTree(model)):
        dim, why = choice(parameter)
        cut = PLAIN
        if dim is not None:
            specs[name], cut = rank_rows.spec(parameter, dim, [DimPart(parameter.shape[dim], parameter.shape[dim])])
        reasons.append(Reason(name, tuple(parameter.shape), cut, why))
    return ReasonedPlan(specs, reasons=tuple(reasons))
