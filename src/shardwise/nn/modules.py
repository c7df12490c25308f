"""`shard_module`: shards a module by a plan. All ranks check the whole plan before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import nn
from torch.distributed import ProcessGroup

from shardwise import settings
from shardwise.comm.agreement import in_step, in_step_sharing
from shardwise.comm.group import Fields, group_ranks, or_default
from shardwise.errors import PlanKindError, plan_error
from shardwise.layout.specs import ShardingSpec
from shardwise.layout.specs.spec import PlacedShardingSpec
from shardwise.nn.context_parallel import ContextParallel
from shardwise.nn.experts import ExpertPlan
from shardwise.nn.fully_sharded import FullyShard, fully_shard
from shardwise.nn.outputs import collect_local_shard, reshard_output
from shardwise.nn.parameters import agree_on_steps
from shardwise.nn.plain_tensors import make_plain_alike
from shardwise.nn.sharding_plan import Resolution, SharderStep, ShardingPlan, ShardingPlanner, resolve_plan
from shardwise.nn.sharding_plan.plan import Sharder

M = TypeVar("M", bound=nn.Module)


def shard_module(
    module: M,
    plan: ShardingPlan
    | ShardingPlanner
    | FullyShard
    | ContextParallel
    | Mapping[str, ShardingSpec | Sharder | int | None],
    src_rank: int = 0,
    process_group: ProcessGroup | None = None,
) -> M:
    """Shard the module in place, as the plan says, and return it.

    Every rank of the group calls it with the same plan, or with a planner that makes the same one. A dict is the first
    part of a `ShardingPlan`: by names and patterns, the dim of each parameter that is cut over all ranks, or None for
    replicas, or a spec::

        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        >>> shardwise.shard_module(model, {"0.*": 0, "2.weight": 1, "2.bias": None})(torch.ones(2, 4)).shape
        torch.Size([2, 4])

    Parameters get the values of the group's rank ``src_rank``, as in `shard_parameter`, one after the other: each
    plain one is freed before the next is sharded. Tensors that stay plain get its values too, for a plain tensor is
    the same on every rank; not on the drop-in, nor within `own_batches`. A `Sharder` replaces its submodule. Outputs
    are changed as by `reshard_output` and `collect_local_shard`.

    The whole plan is checked first. If anything in it is wrong, on any rank, every rank raises one error that lists
    all problems, and the module is unchanged; the sharders, which are called next, raise their own errors.

    A module may be made on the ``meta`` device: then only the shards are ever allocated, uninitialised. What the plan
    does not name stays on ``meta``; `Module.to_empty` gives it memory, and new memory to the shards. Initialise after
    that, or load a checkpoint; `fill_buffers` fills buffers that no checkpoint holds::

        with torch.device("meta"):
            model = Model()
        shard_module(model, ShardingPlan({"**": spec}))
        model.to_empty(device="cpu")
        torch.manual_seed(0)  # the values are those of a plain model that is initialised from this seed
        model.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
    """
    if isinstance(plan, ContextParallel):
        return plan.apply(module, src_rank)
    if isinstance(plan, FullyShard):
        return fully_shard(module, **plan.options(), src_rank=src_rank, process_group=process_group)
    group = or_default(process_group)
    if isinstance(plan, ExpertPlan):
        shard_module(module, plan.without_experts(), src_rank, group)
        plan.distribute(module)
        return module if plan.rest is None else shard_module(module, plan.rest, src_rank, group)
    steps = _resolved(module, plan, group)
    ready = agree_on_steps(lambda: steps.parameters, src_rank, group, _fields_of(steps))
    for swap, sharded in [(step, _replacement(step, group)) for step in steps.sharders]:
        for place in swap.places:
            place.put(sharded)
    ready.shard()
    if not settings.current().own_batches:
        make_plain_alike(module, src_rank, group)
    for output in steps.outputs:
        target = module.get_submodule(output.path)
        if output.spec is None:
            collect_local_shard(target)
        else:
            reshard_output(target, output.spec)
    return module


def _resolved(module: nn.Module, plan: object, group: ProcessGroup) -> Resolution:
    """The steps of the plan if it is sound on every rank; else one error with all problems of all ranks."""

    def work() -> tuple[Resolution, Fields, list[tuple[str, str]]]:
        built: object = plan.build_plan(module) if isinstance(plan, ShardingPlanner) else plan
        if isinstance(built, Mapping):
            built = ShardingPlan(built)
        if not isinstance(built, ShardingPlan):
            found = type(built).__name__
            raise PlanKindError(
                "shard_module takes a ShardingPlan, or a ShardingPlanner that makes one, or a dict by names of "
                f"parameters, found {found}"
            )
        steps = resolve_plan(built, module, group)
        return steps, {"verb": "shard_module"}, steps.problems

    steps, told = in_step_sharing(group, work)
    found_by: dict[tuple[str, str], list[int]] = {}  # for each problem, which of the distinct answers have it
    for kind_told, problems in enumerate(told.kinds):
        for kind, message in dict.fromkeys(map(tuple, problems)):
            found_by.setdefault((kind, message), []).append(kind_told)
    if found_by:
        ranks = group_ranks(group) if len(told) > 1 else (0,)
        raise plan_error(
            [
                (
                    kind,
                    message if len(by) == len(told.kinds) else f"{message} (found on rank {ranks[told.first(by[0])]})",
                )
                for (kind, message), by in found_by.items()
            ]
        )
    return steps


def _fields_of(steps: Resolution) -> Fields:
    """The fields of sharders and outputs that must be equal on all ranks."""
    sharders = {f"Sharder of {step.path}": type(step.sharder).__name__ for step in steps.sharders}
    outputs = {
        f"output of {step.path or 'the module'}": f"{type(step.spec).__name__} {_arguments(step.spec)}"
        for step in steps.outputs
        if step.spec is not None
    }
    local = {"return_local_tensor": [step.path for step in steps.outputs if step.spec is None]}
    return {**sharders, **outputs, **local}


def _arguments(spec: ShardingSpec) -> str:
    """The arguments of a spec in a line; of many placements the first ones and a digest."""
    if not isinstance(spec, PlacedShardingSpec):
        return str(spec._plain_arguments())
    return f"{spec._other_fields()} {spec._places} #{spec._places.digest.hex()[:12]}"


def _replacement(step: SharderStep, group: ProcessGroup) -> nn.Module:
    """The module that a sharder returns, if it returns one on every rank."""

    def work() -> tuple[nn.Module, Fields]:
        new: object = step.sharder.shard(step.module)
        if not isinstance(new, nn.Module):
            sharder, found = type(step.sharder).__name__, type(new).__name__
            raise PlanKindError(f"{sharder}.shard gives a module in the place of {step.path!r}, found {found}")
        return new, {"verb": "Sharder", "path": step.path, "module": type(new).__name__}

    return in_step(group, work)
