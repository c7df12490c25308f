"""The messages of one rank in a transfer: what goes to, or comes from, each member of a group, and where it lies.

This depends on the plan, the rank and the members alone. So it is worked out once, and kept as long as the pieces are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardwise.geometry import IntArray
from shardwise.layout import Layout
from shardwise.transfer.pieces import MOST_ASKED, MOST_SPOTS, Pieces
from shardwise.transfer.plan import TransferPlan, lies_whole


class Spot(NamedTuple):
    """Where a piece lies in the local tensors of a rank."""

    local: int  # which of them
    slices: tuple[slice, ...]  # of the dims up to the last that is cut: empty where the piece is all of it
    elements: int
    run: slice | None  # of the elements of the local tensor in memory, if the piece is one run of them


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
    size: int  # how many members there are

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
    spots = _spots(pieces, layout, layout.rows_on(rank), sent=sent)
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
    return Messages(pieces, each, own, len(members))


def _spots(pieces: Pieces, layout: Layout, here: tuple[int, ...], *, sent: bool) -> list[Spot]:
    """Where pieces lie in this rank's tensors, which are those of these rows of the layout."""
    rows = pieces.src_rows if sent else pieces.dst_rows
    local = {row: k for k, row in enumerate(here)}
    boxes, around = pieces.boxes, layout.at(rows)
    offsets, ends = boxes.offsets - around.offsets, boxes.ends - around.offsets
    cut = (boxes.sizes != around.sizes) * np.arange(1, layout.ndim + 1)
    dims = cut.max(axis=1, initial=0).tolist()  # up to the last one that is cut
    ones = np.ones((len(rows), 1), dtype=np.int64)
    strides = np.concatenate([ones, around.sizes[:, :0:-1]], axis=1).cumprod(axis=1)[:, ::-1]
    begins = (offsets * strides).sum(axis=1).tolist()
    whole = lies_whole(boxes, around).tolist()
    found = []
    spans = zip(rows.tolist(), offsets.tolist(), ends.tolist(), boxes.volumes.tolist(), strict=True)
    for (row, low, high, count), most, begin, lies in zip(spans, dims, begins, whole, strict=True):
        slices = tuple(map(slice, low[:most], high[:most]))
        found.append(Spot(local[row], slices, count, slice(begin, begin + count) if lies else None))
    return found
