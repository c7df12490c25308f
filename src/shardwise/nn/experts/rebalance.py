"""`rebalance`: other ranks for experts between steps, by how many tokens have chosen each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.comm.agreement import in_step, in_step_sharing
from shardwise.comm.group import Fields, group_ranks
from shardwise.errors import PlanError
from shardwise.layout.specs.chunking import parse_weights
from shardwise.nn.experts.balance import balanced, imbalance
from shardwise.nn.experts.layer import ExpertsForward, experts_forward
from shardwise.nn.experts.local_experts import LocalExperts, make_adjacent
from shardwise.nn.experts.placement import ExpertPlacement
from shardwise.nn.experts.route import Holders
from shardwise.nn.sharding_plan.tree import matches
from shardwise.tensor import ShardedTensor

Counts = Sequence[float] | torch.Tensor
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


@dataclass(frozen=True)
class Rebalanced:
    """The ranks of the experts of one layer before and after, and how uneven the work of ranks was and would be.

    An imbalance is how much longer the fullest rank computes than if all had their shares of the tokens.
    """

    layer: str
    before: Holders
    after: Holders
    imbalance_before: float
    imbalance_after: float
    moved: int  # experts that come to ranks which have not had them

    def __str__(self) -> str:
        change = f"imbalance {self.imbalance_before:.2f} → {self.imbalance_after:.2f}"
        return f"{self.layer}: {change}, {self.moved} experts move"


def rebalance(
    model: nn.Module,
    counts: Counts | Mapping[str, Counts] | None = None,
    *,
    room: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
    optimizer: Optimizers = None,
    apply: bool = True,
) -> list[Rebalanced]:
    """Give experts other ranks, so that each rank has its share of the tokens; what was found, layer by layer.

    Every rank of the group calls it, between steps. ``counts`` has the number of tokens for each expert, the same on
    every rank, or by patterns of layers; without it, those count that have come since the layer was made, or since the
    last call. ``room`` has for each rank how many experts it may have, by default as many as now; what is left over is
    filled with copies of the experts that most tokens choose. ``weights`` has for each rank its share of the work.

    Where that makes the fullest rank less full, the parameters of the layer, their gradients, and the states that the
    ``optimizer`` has of them are resharded: an expert travels to the ranks that have not had it, and nothing else.
    States have the experts along their first dim, as parameters have, or belong to one expert of a list. Scalars stay;
    for any other state all ranks raise, and nothing has moved. With ``apply=False``, nothing is changed::

        >>> class Experts(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.scale = torch.nn.Parameter(torch.ones(4, 8))
        ...     def forward(self, x, index, weights):
        ...         return (x[:, None] * self.scale[index] * weights[..., None]).sum(1)
        >>> model = torch.nn.ModuleDict({"experts": Experts()})
        >>> model = shardwise.shard_module(model, shardwise.plans.expert_parallel(model, placement=[0, 0, 1, 1]))
        >>> print(*shardwise.rebalance(model, [50, 40, 5, 5]))
        experts: imbalance 1.80 → 1.10, 2 experts move
    """
    layers = {path: forward for path, one in model.named_modules() if (forward := experts_forward(one)) is not None}
    if not layers:
        raise PlanError("the model has no experts on ranks: shard it by plans.expert_parallel first")
    found, moves = [], []
    for path, forward in layers.items():
        group = next(iter(forward.local.parameters.values()))._process_group
        one = _proposed(path, forward, _given(path, counts), room, weights, group)
        found.append(one)
        if apply and one.after != one.before:
            moves.append((one, forward.local, _states(forward.local, optimizer, path, group)))
    for move in moves:
        _move(*move)
    for forward in layers.values() if apply and counts is None else ():
        forward.chosen = None
    return found


def _given(path: str, counts: Counts | Mapping[str, Counts] | None) -> Counts | None:
    if not isinstance(counts, Mapping):
        return counts
    found = [one for pattern, one in counts.items() if pattern == path or matches(pattern, path)]
    if len(found) != 1:
        raise PlanError(f"{len(found)} of the counts are for {path!r}: give those of one name or pattern")
    return found[0]


def _proposed(
    path: str,
    forward: ExpertsForward,
    given: Counts | None,
    room: Sequence[int] | None,
    weights: Sequence[float] | None,
    group: ProcessGroup,
) -> Rebalanced:
    """The same on every rank, which compare what they were given."""
    holders, ranks = forward.local.holders, group_ranks(group)

    def work() -> tuple[Sequence[float], Fields, list[float]]:
        numbers = forward.chosen if given is None else given
        counted = [0.0] * len(holders) if numbers is None else torch.as_tensor(numbers).double().tolist()
        if len(counted) != len(holders) or not all(0 <= one < float("inf") for one in counted):
            raise PlanError(
                f"{path!r} has {len(holders)} experts: give a number of tokens for each, found {given!r:.80}"
            )
        own = None if room is None else list(room)
        if own is not None and (len(own) != len(ranks) or min(own) < 0 or sum(own) < len(holders)):
            raise PlanError(
                f"room has for each of {len(ranks)} ranks how many experts it may have, {len(holders)} in all or more; "
                f"found {own!s:.80}"
            )
        shares = (1.0,) * len(ranks) if weights is None else parse_weights(weights, len(ranks))
        fields: dict[str, object] = {
            "verb": "rebalance",
            "layer": path,
            "experts": holders,
            "room": own,
            "weights": shares,
        }
        if given is not None:
            fields["counts"] = counted
        return shares, fields, counted

    shares, told = in_step_sharing(group, work)
    counted = told[0] if given is not None else [sum(column) for column in zip(*told, strict=True)]
    now = ExpertPlacement(holders).by_rank(ranks)
    rooms = {rank: len(now[rank]) if room is None else int(room[k]) for k, rank in enumerate(ranks)}
    after = balanced(holders, counted, rooms, dict(zip(ranks, shares, strict=True)))
    before, then = (imbalance(one, counted, ranks, shares) for one in (holders, after))
    moved = sum(len(set(new) - set(old)) for old, new in zip(holders, after, strict=True))
    return Rebalanced(path, holders, after, before, then, moved)


def _states(
    local: LocalExperts, optimizer: Optimizers, path: str, group: ProcessGroup
) -> list[tuple[str, ShardedTensor]]:
    """The states of optimizers that move with experts, each with the name of its parameter; or the error of others.

    Scalars, and what every rank has whole, stay as they are.
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())

    def work() -> tuple[list[tuple[str, ShardedTensor]], Fields]:
        found = []
        for one in optimizers:
            for name, parameter in local.parameters.items():
                for key, value in one.state.get(parameter, {}).items():
                    if not isinstance(value, torch.Tensor) or value.ndim == 0 or _is_everywhere(value, group):
                        continue
                    if not isinstance(value, ShardedTensor) or not local.moves_with(name, value):
                        raise PlanError(
                            f"the state {key!r} of {name!r} in {path!r} cannot move with experts: found size "
                            f"{tuple(value.shape)} beside a parameter of {tuple(parameter.shape)}. {local.MOVABLE}"
                        )
                    found.append((name, key, value))
        fields = {"verb": "rebalance", "layer": path, "states": [(name, key) for name, key, _ in found]}
        return [(name, value) for name, _, value in found], fields

    return in_step(group, work)


def _is_everywhere(value: torch.Tensor, group: ProcessGroup) -> bool:
    return (
        isinstance(value, ShardedTensor)
        and value._layout.is_whole_everywhere
        and set(value._layout.ranks.tolist()) == set(group_ranks(group))
    )


@torch.no_grad()
def _move(one: Rebalanced, local: LocalExperts, states: Sequence[tuple[str, ShardedTensor]]) -> None:
    placement, parameters = ExpertPlacement(one.after), local.parameters
    for name, tensor in (*parameters.items(), *states):
        tensor.reshard(local.spec(name, tensor, placement))
    for parameter in parameters.values():
        make_adjacent(parameter)
