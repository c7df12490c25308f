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
    most: int  # to so many members this one sends tokens for an expert in turn
    second: torch.Tensor  # for each expert these members: the place of the second of two numbers for each member
    code: torch.Tensor  # and which member it is, in the upper bits, with the number that the expert has there
    number_bits: int  # the lower bits
    ways: torch.Tensor | None  # how many members there are for each expert; None where there is one

    def targets(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For each choice of an expert by a token, contiguous: `second` of the member that gets it, and its code."""
        choice = index.view(-1)
        if self.ways is not None:
            turn = torch.arange(self.here, self.here + len(index), device=index.device)[:, None] % self.ways[index]
            choice = choice * self.most + turn.view(-1)
        return self.second.index_select(0, choice), self.code.index_select(0, choice)

    def experts_here(self, code: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of codes: the experts' numbers on this member, and whether they are here; those elsewhere have others."""
        number = torch.bitwise_xor(code.long(), self.here << self.number_bits)
        return number, number < (1 << self.number_bits)


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
    in_turn = [(expert, to) for expert, one in enumerate(targets) for to in [*one, *[one[0]] * (most - len(one))]]
    number_there = [{expert: number for number, expert in enumerate(one)} for one in own]
    bits = max(map(len, own), default=0).bit_length()
    second = torch.tensor([2 * to + 1 for _, to in in_turn], dtype=torch.int64)
    code = torch.tensor([to << bits | number_there[to][expert] for expert, to in in_turn], dtype=torch.int32)
    ways = None if most == 1 else torch.tensor([len(one) for one in targets]).to(device)
    copies = tuple(map(len, held))
    return ExpertRoute(len(ranks), here, tuple(own), copies, most, second.to(device), code.to(device), bits, ways)


def _nearest(members: Sequence[int], count: int, here: int) -> list[int]:
    """Of the members that have an expert, those that this one sends tokens to."""
    if here in members:
        return [here]
    stretch = count // len(members)
    if count % len(members) == 0 and [member // stretch for member in members] == list(range(len(members))):
        return [members[here // stretch]]
    return list(members)
