"""`ExpertRoute`: to which rank of a group a token goes for an expert. Pure: known from where the experts lie.

Of an expert's copies, tokens go to the one on their own rank. Where the copies lie one in each of equal stretches of
ranks, as along an axis of a mesh, tokens go to the one in their stretch. Else they go to all copies in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.distributed import ProcessGroup

from shardwise.comm.group import cached_per_group, rank_array
from shardwise.errors import PropertyError
from shardwise.layout import Layout
from shardwise.torch_private import unset_fake_mode

Holders = tuple[tuple[int, ...], ...]  # for each expert, the global ranks that have it


@lru_cache(maxsize=256)
def holders_of(layout: Layout) -> Holders:
    """The ranks of each expert, of a parameter with the experts along its first dim."""
    if any(layout.cuts(dim) for dim in range(1, layout.ndim)):
        raise PropertyError(
            f"experts lie whole on ranks, and this parameter is cut through them: {layout.outline}. Cut it along its "
            "first dim, as plans.expert_parallel does"
        )
    found: list[set[int]] = [set() for _ in range(layout.size[0])]
    boxes = layout.boxes
    for begin, size, rank in zip(boxes.offsets[:, 0], boxes.sizes[:, 0], layout.ranks, strict=True):
        for expert in range(int(begin), int(begin + size)):
            if int(rank) in found[expert]:
                raise PropertyError(f"rank {rank} has expert {expert} twice: {layout.outline}")
            found[expert].add(int(rank))
    return tuple(tuple(sorted(ranks)) for ranks in found)


@dataclass(frozen=True, eq=False)
class ExpertRoute:
    """The ranks of experts, as one member of a group sees them. Members are numbered as in the group."""

    members: int
    here: int
    experts: tuple[tuple[int, ...], ...]  # of each member, ascending
    copies: tuple[int, ...]  # of each expert
    member: torch.Tensor  # for each expert, the members that get this one's tokens in turn
    local: torch.Tensor  # and the number that the expert has there
    ways: torch.Tensor | None  # how many of these there are; None where there is one for each

    def targets(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For each choice of an expert by a token, the member that gets the token, and the expert's number there."""
        if self.ways is None:
            return self.member[:, 0][index], self.local[:, 0][index]
        turn = torch.arange(self.here, self.here + len(index), device=index.device)[:, None] % self.ways[index]
        return self.member[index, turn], self.local[index, turn]


@cached_per_group(maxsize=512)
def expert_route(group: ProcessGroup, holders: Holders, device: torch.device) -> ExpertRoute:
    """The route to these experts in a group, with its tables on a device."""
    with unset_fake_mode():  # a forecast may be the first to ask
        return make_expert_route(holders, rank_array(group).tolist(), group.rank(), device)


def make_expert_route(holders: Holders, ranks: Sequence[int], here: int, device: torch.device) -> ExpertRoute:
    """The same for one member of any ranks."""
    number = {rank: member for member, rank in enumerate(ranks)}
    held = [sorted(number[rank] for rank in one) for one in holders]
    own = [tuple(expert for expert, members in enumerate(held) if member in members) for member in range(len(ranks))]
    targets = [_nearest(members, len(ranks), here) for members in held]
    most = max(map(len, targets), default=1)
    member = torch.tensor([[*one, *[one[0]] * (most - len(one))] for one in targets], dtype=torch.int64)
    local = torch.tensor(
        [[own[to].index(expert) for to in row] for expert, row in enumerate(member.tolist())], dtype=torch.int64
    )
    ways = None if most == 1 else torch.tensor([len(one) for one in targets]).to(device)
    copies = tuple(map(len, held))
    return ExpertRoute(len(ranks), here, tuple(own), copies, member.to(device), local.to(device), ways)


def _nearest(members: Sequence[int], count: int, here: int) -> list[int]:
    """Of the members that have an expert, those that this one sends tokens to."""
    if here in members:
        return [here]
    stretch = count // len(members)
    if count % len(members) == 0 and [member // stretch for member in members] == list(range(len(members))):
        return [members[here // stretch]]
    return list(members)
