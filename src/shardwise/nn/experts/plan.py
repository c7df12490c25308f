"""`expert_parallel`: the plan that puts whole experts on ranks, beside any plan for the rest of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.group import group_ranks
from shardwise.errors import PlanError, PlanNameError
from shardwise.layout.placement import device_for
from shardwise.nn.experts.block import distribute_list
from shardwise.nn.experts.finding import ExpertsLayer, find_experts
from shardwise.nn.experts.layer import distribute
from shardwise.nn.experts.placement import ExpertPlacement
from shardwise.nn.fully_sharded import FullyShard
from shardwise.nn.plans import Reason, ReasonedPlan
from shardwise.nn.plans.rank_rows import RankRows
from shardwise.nn.plans.reasons import PLAIN
from shardwise.nn.sharding_plan import ModuleTree, ShardingPlan
from shardwise.nn.sharding_plan.steps import each_parameter
from shardwise.nn.sharding_plan.tree import matches

MOST_SHOWN = 8  # layers, in an error
Placement = Sequence[int | Sequence[int]]
Rest = ShardingPlan | FullyShard | Mapping[str, Any] | None


@dataclass
class ExpertPlan(ReasonedPlan):
    """A `ReasonedPlan` under which the tokens of layers of experts travel to their experts."""

    layers: tuple[str, ...] = ()  # the paths of the layers of experts
    rest: FullyShard | None = None  # by which the rest of the model is sharded afterwards

    def without_experts(self) -> ShardingPlan:
        """The same without the experts' own way to compute: where parameters lie, and what becomes of outputs."""
        return ShardingPlan(self.plan, self.output_plan, self.return_local_tensor)

    def distribute(self, model: nn.Module) -> None:
        """Let tokens travel to the experts of a model whose parameters are sharded by this plan."""
        for path in self.layers:
            layer = model.get_submodule(path)
            if isinstance(layer, nn.ModuleList):
                distribute_list(model.get_submodule(path.rpartition(".")[0]), layer)
            else:
                distribute(layer)


def expert_parallel(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    weights: Sequence[float] | None = None,
    placement: Placement | Mapping[str, Placement] | None = None,
    experts: str | Sequence[str] | None = None,
    rest: Rest = None,
    process_group: ProcessGroup | None = None,
) -> ExpertPlan:
    """The plan that puts the experts of a model's mixtures on ranks, each of them whole. Tokens travel to them.

    A layer of experts has the experts along the first dim of its parameters, and a forward of tokens, of the experts
    that each token has chosen, and of the weights of these choices; so have those of transformers. Each rank runs this
    forward with its own experts, on the tokens that have chosen them. Or a layer is an `nn.ModuleList` of experts: the
    module that has the list computes on the samples of each rank, and the rows with which it calls an expert travel
    there. The layers are found by their names (``experts``, or a class that ends so), or are those that the patterns
    ``experts`` name.

    Experts are shared out in equal numbers, or in proportion to ``weights``, which has a number for each rank; or
    ``placement`` has for each expert its rank, or the ranks of its copies: any numbers on each, none on some. A mapping
    gives placements by patterns of layers. Copies of an expert share its tokens, and have the same gradient, the sum of
    all of theirs. With one axis of a larger mesh, as in ``mesh["ep"]``, each line along that axis has all experts.

    ``rest`` is the plan for the rest of the model: `FullyShard`, or any plan for `shard_module`; without it, the rest
    stays plain. Every rank makes the same plan; nothing is sent::

        >>> import torch, torch.distributed as dist
        >>> dist.init_process_group("fake", rank=0, world_size=3)
        >>> class Experts(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up, self.down = nn.Parameter(torch.randn(7, 4, 8)), nn.Parameter(torch.randn(7, 8, 4))
        ...     def forward(self, x, index, weights):
        ...         made = torch.bmm(torch.bmm(x[:, None], self.up[index[:, 0]]).relu(), self.down[index[:, 0]])
        ...         return made[:, 0] * weights
        >>> print(expert_parallel(nn.ModuleDict({"experts": Experts()}), placement=[0, 0, 0, 0, [0, 1], 1, 1]))
        parameter     size   cut                               why
        experts.up    7×4×8  experts 5 | 3 | 0, 1 with copies  whole experts on ranks
        experts.down  7×8×4  experts 5 | 3 | 0, 1 with copies  whole experts on ranks
        2 of 2 parameters are cut
        >>> dist.destroy_process_group()
    """
    if weights is not None and placement is not None:
        raise PlanError("experts are shared out by weights, or by a placement: give one of them")
    rank_rows = RankRows.of(mesh, weights, process_group)
    ranks = group_ranks(rank_rows.process_group)
    tree = ModuleTree(model)
    specs: dict[str, Any] = {}
    cuts: dict[str, str] = {}
    layers = find_experts(tree, experts)
    if isinstance(placement, Mapping):
        _require_layers(placement, layers)
    for layer in layers:
        chosen = _placement_of(layer, placement, rank_rows, ranks)
        for name, own in layer.parameters.items():
            kind = rank_rows.device_type or device_for(own.device.type, rank_rows.process_group)
            specs[name], cuts[name] = layer.spec(name, chosen, kind), chosen.describe(ranks)
    others = _plan_of(rest)
    kept: dict[str, Any] = (
        {} if others is None else {name: spec for name, spec in others.plan.items() if name not in specs}
    )
    known = {one.name: one for one in others.reasons} if isinstance(others, ReasonedPlan) else {}
    reasons = []
    for name, parameter in each_parameter(tree):
        size = tuple(parameter.shape)
        if name in specs:
            reasons.append(Reason(name, size, cuts[name], "whole experts on ranks"))
        elif name in known:
            reasons.append(known[name])
        else:
            reasons.append(Reason(name, size, *_cut_of_rest(name, rest, kept)))
    return ExpertPlan(
        {**specs, **kept},
        output_plan=None if others is None else others.output_plan,
        return_local_tensor=None if others is None else others.return_local_tensor,
        reasons=tuple(reasons),
        layers=tuple(layer.path for layer in layers),
        rest=rest if isinstance(rest, FullyShard) else None,
    )


def _plan_of(rest: Rest) -> ShardingPlan | None:
    """The plan that `shard_module` follows in one go with that of the experts."""
    if rest is None or isinstance(rest, FullyShard):
        return None
    if isinstance(rest, Mapping):
        return ShardingPlan(rest)
    if isinstance(rest, ShardingPlan):
        return rest
    raise PlanError(f"rest is a plan for shard_module, or plans.FullyShard(...), found {type(rest).__name__}")


def _cut_of_rest(name: str, rest: Rest, kept: Mapping[str, Any]) -> tuple[str, str]:
    if isinstance(rest, FullyShard):
        return "fully sharded", "the plan for the rest"
    named = name in kept or any(matches(pattern, name) for pattern in kept)
    return ("as given", "the plan for the rest") if named else (PLAIN, "no layer of experts")


def _fits(pattern: str, layer: ExpertsLayer) -> bool:
    return pattern == layer.path or matches(pattern, layer.path)


def _require_layers(patterns: Iterable[str], layers: Sequence[ExpertsLayer]) -> None:
    """Raise for a pattern that is for no layer of experts."""
    for pattern in patterns:
        if not any(_fits(pattern, layer) for layer in layers):
            names = ", ".join(repr(layer.path) for layer in layers[:MOST_SHOWN]) + ", …" * (len(layers) > MOST_SHOWN)
            raise PlanNameError(f"the placement for {pattern!r} is for no layer of experts: there are {names}")


def _placement_of(
    layer: ExpertsLayer, given: Placement | Mapping[str, Placement] | None, rows: RankRows, ranks: Sequence[int]
) -> ExpertPlacement:
    if isinstance(given, Mapping):
        found = [one for pattern, one in given.items() if _fits(pattern, layer)]
        if len(found) > 1:
            raise PlanError(f"several placements are for {layer.path!r}: keep one of them")
        given = found[0] if found else None
    if given is None:
        return ExpertPlacement.even(layer.experts, rows)
    return ExpertPlacement.parse(given, layer.experts, ranks)
