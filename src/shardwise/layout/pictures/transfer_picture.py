"""The picture of a transfer plan: the layout before, who sends how much to whom, the layout after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardwise.layout.geometry import IntArray
from shardwise.layout.pictures.colours import colour
from shardwise.layout.pictures.layout_drawing import Details, layout_drawings
from shardwise.layout.pictures.layout_text import layout_as_text
from shardwise.layout.pictures.picture import WIDTH, Picture
from shardwise.layout.pictures.subjects import PiecesLike, PlanLike
from shardwise.layout.pictures.svg import Canvas
from shardwise.layout.pictures.words import SizeUnit, numbered, percent, ranks_text, size_text

LAST = 2  # ranks shown after the ranks that are summed up


@dataclass(frozen=True)
class Party:
    """A rank that sends or receives, or all ranks that are not shown one by one."""

    ranks: tuple[int, ...]

    @property
    def is_rest(self) -> bool:
        """Whether this party is several ranks."""
        return len(self.ranks) > 1

    @property
    def name(self) -> str:
        """The rank, or how many there are."""
        return f"{len(self.ranks)} more" if self.is_rest else str(self.ranks[0])

    @property
    def phrase(self) -> str:
        """The ranks in words."""
        return ranks_text(self.ranks)


@dataclass(frozen=True)
class TrafficTable:
    """Elements from each sender to each receiver. All of `moves` together are what the plan moves."""

    senders: Sequence[Party]
    receivers: Sequence[Party]
    moves: IntArray  # from one rank to another
    stays: IntArray  # from a rank to itself

    @property
    def sent(self) -> list[int]:
        """Elements that each sender sends to others."""
        sums: list[int] = self.moves.sum(axis=1).tolist()
        return sums

    @property
    def received(self) -> list[int]:
        """Elements that each receiver gets from others."""
        sums: list[int] = self.moves.sum(axis=0).tolist()
        return sums


def traffic_table(plans: Sequence[tuple[PlanLike, int]], most: int) -> TrafficTable:
    """The table of several plans together, each with the weight of an element.

    It has at most so many senders and receivers; of more, half of that. Only the shown ones are computed.
    """
    sides = [[plan.src for plan, _ in plans], [plan.dst for plan, _ in plans]]
    none: IntArray = np.zeros(0, dtype=np.int64)
    senders, receivers = (_parties(np.concatenate([none, *(one.ranks for one in side)]), most) for side in sides)
    moves, stays = (np.zeros((len(senders), len(receivers)), dtype=np.int64) for _ in range(2))
    for plan, each in plans:
        for total, counted in zip((moves, stays), _counted(plan, senders, receivers), strict=True):
            total += counted * each
    return TrafficTable(senders, receivers, moves, stays)


def _counted(plan: PlanLike, senders: Sequence[Party], receivers: Sequence[Party]) -> tuple[IntArray, IntArray]:
    """Elements that move and that stay."""
    moves, stays = (np.zeros((len(senders), len(receivers)), dtype=np.int64) for _ in range(2))
    for row, sender in enumerate(senders):
        for column, receiver in enumerate(receivers):
            if not sender.is_rest:
                moves[row, column], stays[row, column] = _between(
                    sender.ranks[0], receiver, plan.sends(sender.ranks[0])
                )
            elif not receiver.is_rest:
                there = receiver.ranks[0]
                moves[row, column], stays[row, column] = _between(there, sender, plan.receives(there))
    rest = [[number for number, party in enumerate(side) if party.is_rest] for side in (senders, receivers)]
    if rest[0] and rest[1]:  # between the ranks that are summed up
        moves[rest[0][0], rest[1][0]] = plan.moved - int(moves.sum())
    return moves, stays


def _parties(ranks: IntArray, most: int) -> list[Party]:
    known = np.unique(ranks).tolist()
    if len(known) <= most:
        return [Party((rank,)) for rank in known]
    first = most // 2 - LAST
    alone = [[(rank,) for rank in some] for some in (known[:first], known[-LAST:])]
    return [Party(some) for some in (*alone[0], tuple(known[first:-LAST]), *alone[1])]


def _between(rank: int, others: Party, pieces: PiecesLike) -> tuple[int, int]:
    """Elements between a rank and these others, and between it and itself."""
    peers, volumes = pieces.peers, pieces.boxes.volumes
    chosen = np.isin(peers, others.ranks)
    own = chosen & (peers == rank)
    return int(volumes[chosen & ~own].sum()), int(volumes[own].sum())


MOST_DRAWN = 8  # senders and receivers in the drawing
MOST_WRITTEN = 16  # and in the terminal
PANEL, TALLEST = 160.0, 230.0  # pixels of a layout
CELL = (54.0, 34.0)
HEAD = (54.0, 54.0)  # room for the names of senders, and of receivers


def transfer_picture(plan: PlanLike, *, dtype: torch.dtype | None = None, width: int = WIDTH) -> Picture:
    """The picture of a plan, in bytes of this dtype or in elements."""
    unit = SizeUnit.of(dtype)
    return Picture(
        f"Transfer of {size_text(plan.src.size)}",
        [transfer_summary(plan, unit)],
        lambda: [
            *layout_drawings(plan.src, Details(unit, caption="before", width=PANEL, height=TALLEST)),
            _matrix(traffic_table([(plan, 1)], MOST_DRAWN), unit),
            *layout_drawings(plan.dst, Details(unit, caption="after", width=PANEL, height=TALLEST)),
        ],
        lambda columns, colours: _text(plan, dtype, columns, colours),
        width,
    )


def traffic_picture(
    title: str, notes: Sequence[str], plans: Sequence[tuple[PlanLike, int]], *, width: int = WIDTH
) -> Picture:
    """Who sends how much to whom by several plans together, each with the bytes of its elements."""
    unit = SizeUnit(1)
    return Picture(
        title,
        notes,
        lambda: [_matrix(traffic_table(plans, MOST_DRAWN), unit)],
        lambda columns, colours: "\n".join([title, *notes, *_rows(traffic_table(plans, MOST_WRITTEN), unit)]),
        width,
    )


def transfer_summary(plan: PlanLike, unit: SizeUnit) -> str:
    """In words: how much moves, between how many ranks."""
    senders, receivers = (len(set(layout.ranks.tolist())) for layout in (plan.src, plan.dst))
    part = percent(plan.moved / max(plan.src.size.numel(), 1))
    who = f"from {numbered(senders, 'rank')} to {receivers:,}"
    return f"{unit.phrase(plan.moved)} move {who}, {part} of the tensor; no transfer could move less"


def _matrix(traffic: TrafficTable, unit: SizeUnit) -> Canvas:
    """A cell for each sender and receiver, with a bar for how much goes; what stays is dashed."""
    canvas, (broad, high), (left, top) = Canvas(), CELL, HEAD
    alone = np.ix_(*([not party.is_rest for party in side] for side in (traffic.senders, traffic.receivers)))
    most = max(int(traffic.moves[alone].max(initial=0)), 1)
    canvas.text(2, 13, "from ↓ to →", css="bold")
    for column, (party, count) in enumerate(zip(traffic.receivers, traffic.received, strict=True)):
        with canvas.mark(f"{party.phrase} {'get' if party.is_rest else 'gets'} {unit.phrase(count)} from others"):
            _name(canvas, party, left + broad * column + 3, top - 20)
            canvas.text(left + broad * column + 3, top - 6, unit.text(count), size=9.5, css="soft")
    for row, (party, count) in enumerate(zip(traffic.senders, traffic.sent, strict=True)):
        with canvas.mark(f"{party.phrase} {'send' if party.is_rest else 'sends'} {unit.phrase(count)} to others"):
            _name(canvas, party, 2, top + high * row + 15)
            canvas.text(2, top + high * row + 28, unit.text(count), size=9.5, css="soft")
        for column in range(len(traffic.receivers)):
            _cell(canvas, traffic, (row, column), (left + broad * column, top + high * row), most, unit)
    y = top + high * len(traffic.senders) + 16
    canvas.rect(2, y - 10, 18, 11, css="empty")
    canvas.text(26, y, "stays; below a name: all it sends or gets", size=10.5, css="soft")
    return canvas


def _name(canvas: Canvas, party: Party, x: float, y: float) -> None:
    if party.is_rest:
        canvas.text(x, y, f"+{len(party.ranks)}", size=11.5, css="bold")
        return
    canvas.rect(x, y - 10, 11, 11, fill=colour(party.ranks[0]), radius=3)
    canvas.text(x + 15, y, party.name, size=11.5, css="bold")


def _cell(
    canvas: Canvas, traffic: TrafficTable, at: tuple[int, int], corner: tuple[float, float], most: int, unit: SizeUnit
) -> None:
    sender, receiver = traffic.senders[at[0]], traffic.receivers[at[1]]
    moves, stays = int(traffic.moves[at]), int(traffic.stays[at])
    (x, y), (width, height) = corner, CELL
    middle = x + width / 2
    if not moves and sender.ranks == receiver.ranks and not sender.is_rest:
        with canvas.mark(f"{unit.phrase(stays)} stay on {sender.phrase}", "stays"):
            canvas.rect(x + 1.5, y + 1.5, width - 3, height - 3, css="empty")
            canvas.text(middle, y + 20, unit.text(stays) if stays else "·", size=10, css="soft", anchor="middle")
        return
    each = " in all" if sender.is_rest or receiver.is_rest else ""
    tooltip = f"{sender.phrase} → {receiver.phrase}: {unit.phrase(moves)}{each}"
    with canvas.mark(tooltip if moves else f"{sender.phrase} → {receiver.phrase}: nothing", "move"):
        canvas.rect(x + 1, y + 1, width - 2, height - 2, css="shade")
        canvas.text(middle, y + 18, unit.text(moves) if moves else "·", size=10, anchor="middle")
        if moves and not each:
            paint = colour(sender.ranks[0])
            canvas.rect(x + 5, y + height - 10, max((width - 10) * moves / most, 2.0), 4, fill=paint)


# In the terminal ------------------------------------------------------------------------------------------------------


def _text(plan: PlanLike, dtype: torch.dtype | None, width: int, colours: bool) -> str:
    unit = SizeUnit.of(dtype)
    before, after = (
        layout_as_text(layout, dtype=dtype, width=width, colours=colours) for layout in (plan.src, plan.dst)
    )
    return "\n".join(
        [
            f"before: {before}",
            transfer_summary(plan, unit),
            *_rows(traffic_table([(plan, 1)], MOST_WRITTEN), unit),
            f"after: {after}",
        ]
    )


def _rows(traffic: TrafficTable, unit: SizeUnit) -> list[str]:
    """What goes from each rank (down) to each rank (across); what stays is in brackets."""
    rows = [["", *(f"to {party.name}" for party in traffic.receivers)]]
    for row, sender in enumerate(traffic.senders):
        cells = []
        for column in range(len(traffic.receivers)):
            moves, stays = int(traffic.moves[row, column]), int(traffic.stays[row, column])
            cells.append(unit.text(moves) if moves else f"[{unit.text(stays)}]" if stays else "·")
        rows.append([f"from {sender.name}", *cells])
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return ["  " + "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
