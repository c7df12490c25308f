"""`fully_shard`: each rank keeps a part of every unit's parameters, and computes on its own samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeVar

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.agreement import in_step
from shardwise.comm.group import Fields
from shardwise.errors import PlanError
from shardwise.layout.specs.chunking import parse_weights
from shardwise.nn.fully_sharded.building import Held, UnitBuilder, held_by_rows
from shardwise.nn.fully_sharded.cuts import ELEMENTS, Align, Loads
from shardwise.nn.fully_sharded.flat_memory import Precision
from shardwise.nn.fully_sharded.rank_groups import RankGroups
from shardwise.nn.fully_sharded.runtime import FullySharded
from shardwise.nn.fully_sharded.unit_choice import UnitChoice, choose_units
from shardwise.nn.own_shards import keeps_own_shards
from shardwise.nn.plain_tensors import make_plain_alike
from shardwise.nn.replaced_parameters import replacing_in_optimizers
from shardwise.nn.sharding_plan import ModuleTree
from shardwise.nn.sharding_plan.steps import each_parameter
from shardwise.tensor import ShardedTensor

M = TypeVar("M", bound=nn.Module)


def fully_shard(
    model: M,
    units: str | Sequence[str] | None = None,
    *,
    weights: Sequence[float] | None = None,
    align: Align | Mapping[str, Align] = ELEMENTS,
    precision: Precision | None = None,
    prefetch: int = 1,
    keep: bool = False,
    offload: bool = False,
    src_rank: int = 0,
    mesh: DeviceMesh | None = None,
    process_group: ProcessGroup | None = None,
) -> M:
    """Shard a model so that each rank keeps a part of every parameter and computes on samples of its own.

    Every rank of the group calls it, with the same model; it is changed in place, and returned. Its parameters become
    sharded tensors. Batches come by `from_local` or `join`, in any numbers of samples; loss and gradients are those of
    all samples of all ranks::

        >>> model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
        >>> model = shardwise.fully_shard(model)
        >>> batch = shardwise.from_local(torch.ones(1 + dist.get_rank(), 8))
        >>> model(batch).mean().backward()
        >>> model[0].weight.grad.shape
        torch.Size([8, 8])

    ``units`` are patterns of modules' names. The parameters of a unit are gathered together before it computes, and
    freed behind it; by default, the units are the members of lists of equal modules, and the rest is one more.
    ``weights`` has a number for each rank: ranks keep elements in proportion. ``align`` says what of a parameter
    stays together: single ``"elements"``, ``"rows"``, a number of elements, or whole ``"parameters"``; a mapping gives
    it by patterns of names. ``precision`` has the dtypes in which parameters are gathered and gradients are summed.
    ``prefetch`` is how many units are gathered ahead; with ``keep``, units stay gathered from the forward to the
    backward. With ``offload``, parameters, gradients and states of optimizers stay in pinned memory of the host, and
    parameters come to the device to be gathered. ``model.fully_sharded`` is a `FullySharded`: printed, it tells what
    was made.

    On a ``mesh`` of two axes, the ranks along the second one share out the parameters, and there are replicas along the
    first; each rank has samples of its own all the same. ``weights`` is for the ranks along the second axis.

    A model that was sharded along one axis of a mesh of two, as by ``plans.tensor_parallel(model, mesh["tp"])``, is
    shared out further along the other one with ``mesh=mesh["dp"]``: the ranks of a line of that axis, which had the
    same boxes, keep a part of each. Batches are cut along that axis, too.

    Experts that ``plans.expert_parallel`` has put on ranks stay there.

    Parameters get the values of the group's rank ``src_rank``, as in `shard_module`. Of a model on ``meta``, only the
    shards are ever allocated.
    """
    tree = ModuleTree(model)
    sharded = [
        one
        for name, one in each_parameter(tree)
        if isinstance(one, ShardedTensor) and not keeps_own_shards(tree.parameters[name].owner)
    ]
    groups = RankGroups.within(mesh, sharded[0]._process_group) if sharded else RankGroups.of(mesh, process_group)
    group = groups.everyone

    def work() -> tuple[tuple[list[UnitChoice], dict[str, Held], list[Loads]], Fields]:
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise PlanError(f"prefetch is how many units are gathered ahead; found {prefetch!r:.80}")
        if any(one._process_group is not group for one in sharded):
            raise PlanError("the parameters of this model are sharded over several process groups")
        choices = choose_units(tree, units)
        held = held_by_rows(choices, align, groups)
        shares = None if weights is None else parse_weights(weights, groups.parts)
        loads = [
            Loads.of(shares, groups.parts) for _ in range(max((len(one.boxes) for one in held.values()), default=1))
        ]
        options = {
            "weights": loads[0].shares,
            "prefetch": prefetch,
            "keep": keep,
            "precision": precision,
            "ranks": groups.ranks.tolist(),
        }
        fields = {f"unit {one.path or 'of the rest'}": _outline(one, held) for one in choices}
        return (choices, held, loads), {"verb": "fully_shard", "src_rank": src_rank, **options, **fields}

    choices, held, loads = in_step(group, work)
    with replacing_in_optimizers():
        made = UnitBuilder(held, loads, groups, precision or Precision(), src_rank, offload).units(choices)
    make_plain_alike(model, src_rank, group)
    own = loads[groups.row_number if len(loads) > 1 else 0]
    again = partial(
        fully_shard,
        units=units,
        weights=weights,
        align=align,
        precision=precision,
        prefetch=prefetch,
        keep=keep,
        offload=offload,
        mesh=mesh,
    )
    FullySharded(model, made, group, own, prefetch=prefetch, keep=keep, again=again)
    return model


def _outline(choice: UnitChoice, held: Mapping[str, Held]) -> str:
    """What must be the same on every rank."""
    found = ((name, slots[0].get()) for name, slots in choice.parameters.items())
    return str([(name, held[name].entries, one.dtype, one.requires_grad, one.is_meta) for name, one in found])
