"""The messages of one rank in a transfer: what goes to, or comes from, each member of a group, and where it lies.

Messages depend on the plan, the rank and the members alone. So they are made once, and kept as long as the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from shardwise.comm.transfer.pieces import MOST_ASKED, MOST_SPOTS, Pieces, Spot
from shardwise.comm.transfer.plan import TransferPlan
from shardwise.comm.transfer.views import as_data
from shardwise.layout import Layout
from shardwise.layout.geometry import IntArray


class Message(NamedTuple):
    """All that goes to, or comes from, one member of a group."""

    member: int  # by its number
    run: slice  # its pieces, among those of all messages
    spots: list[Spot]
    elements: int
    same: int  # the number of the first message of the same pieces of the source: both hold the same


@dataclass(frozen=True, eq=False)
class Messages:
    """All that a rank sends in a group, or all that it gets, in the order of the members."""

    pieces: Pieces
    each: list[Message]  # with pieces; one of them may be what stays on this rank
    own: Message  # that one, or one without pieces

    @cached_property
    def others(self) -> list[Message]:
        """Those to or from other members, the next one first: so not all send to the same one."""
        here = self.own.member
        both = [one for one in self.each if one.member > here], [one for one in self.each if one.member < here]
        return [*both[0], *both[1]]

    @cached_property
    def spots(self) -> list[Spot]:
        """Where the pieces of all messages lie."""
        return [spot for message in self.each for spot in message.spots]

    @cached_property
    def sums_cover(self) -> int:
        """How many elements are written where pieces that meet are added up."""
        first = [numbers[0] for numbers in self.pieces.meetings or []]
        return int(self.pieces.boxes.volumes[first].sum())


def messages_sent(plan: TransferPlan, rank: int, members: IntArray) -> Messages:
    """What a rank sends: in its local tensors of the source."""
    return _messages(plan.sends(rank), plan.src, rank, members, sent=True)


def messages_received(plan: TransferPlan, rank: int, members: IntArray) -> Messages:
    """What a rank gets: in its local tensors of the destination."""
    return _messages(plan.receives(rank), plan.dst, rank, members, sent=False)


def _messages(pieces: Pieces, layout: Layout, rank: int, members: IntArray, *, sent: bool) -> Messages:
    for group, found in pieces.messages:
        if group is members:  # there is one array for each group
            return found
    made = _made(pieces, layout, rank, members, sent=sent)
    if len(pieces.messages) < MOST_ASKED and max(len(pieces), len(members)) <= MOST_SPOTS:
        pieces.messages.append((members, made))
    return made


def _made(pieces: Pieces, layout: Layout, rank: int, members: IntArray, *, sent: bool) -> Messages:
    order = np.argsort(members, kind="stable")
    number = order[np.searchsorted(members[order], pieces.peers)]  # of the member that each piece goes to, or is from
    if (np.diff(number) < 0).any():
        chosen = np.argsort(number, kind="stable")
        pieces, number = pieces.chosen(chosen), number[chosen]
    spots = pieces.spots(layout, rank, sent=sent)
    begins = np.flatnonzero(np.diff(number, prepend=-1)).tolist()
    here = int(np.flatnonzero(members == rank)[0])
    each, own = [], Message(here, slice(0), [], 0, -1)
    same: dict[tuple[bytes, ...], int] = {}
    for k, (begin, end) in enumerate(zip(begins, [*begins[1:], len(pieces)], strict=bool(begins))):
        run = slice(begin, end)
        arrays = (pieces.src_rows[run], pieces.boxes.offsets[run], pieces.boxes.sizes[run])
        first = same.setdefault(tuple(array.tobytes() for array in arrays), k)
        count = sum(spot.elements for spot in spots[run])
        message = Message(int(number[begin]), run, spots[run], count, first)
        each.append(message)
        own = message if message.member == here else own
    return Messages(pieces, each, own)


class LocalMemory:
    """The local tensors of one layout; whether one can be sent from, or received into, is asked once for each."""

    def __init__(self, tensors: Sequence[torch.Tensor], fits: Callable[[torch.Tensor], bool]) -> None:
        self.tensors, self._fits = [as_data(tensor) for tensor in tensors], fits
        self._flat: dict[int, torch.Tensor | None] = {}

    def views(self, message: Message) -> list[torch.Tensor]:
        """All pieces of a message."""
        return [spot.view(self.tensors) for spot in message.spots]

    def run(self, message: Message) -> torch.Tensor | None:
        """A message as one dim of its elements, if they are one run of memory that can travel as it lies."""
        if len(message.spots) != 1:
            return None
        spot = message.spots[0]
        flat = self._flat[spot.local] if spot.local in self._flat else self._flattened(spot.local)
        if flat is None:  # a piece of a tensor that lies apart may be whole itself
            view = spot.view(self.tensors) if spot.slices else None
            return view.view(-1) if view is not None and self._fits(view) else None
        if not spot.slices:
            return flat
        return None if spot.run is None else flat[spot.run]

    def _flattened(self, local: int) -> torch.Tensor | None:
        tensor = self.tensors[local]
        found = self._flat[local] = tensor.view(-1) if self._fits(tensor) else None
        return found
