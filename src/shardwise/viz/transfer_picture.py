"""The picture of a transfer plan: the layout before, who sends how much to whom, the layout after."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shardwise.viz.colours import colour
from shardwise.viz.layout_drawing import Details, layout_drawings
from shardwise.viz.layout_text import layout_text
from shardwise.viz.picture import WIDTH, Picture
from shardwise.viz.subjects import PlanLike
from shardwise.viz.svg import Canvas
from shardwise.viz.traffic import Party, Traffic, traffic_of, traffic_of_all
from shardwise.viz.words import Unit, numbered, percent, size_text

MOST_DRAWN = 8  # senders and receivers in the drawing
MOST_WRITTEN = 16  # and in the terminal
PANEL, TALLEST = 160.0, 230.0  # pixels of a layout
CELL = (54.0, 34.0)
HEAD = (54.0, 54.0)  # room for the names of senders, and of receivers


def transfer_picture(plan: PlanLike, *, dtype: torch.dtype | None = None, width: int = WIDTH) -> Picture:
    """The picture of a plan, in bytes of this dtype or in elements."""
    unit = Unit.of(dtype)
    return Picture(
        f"Transfer of {size_text(plan.src.size)}",
        [summary(plan, unit)],
        lambda: [
            *layout_drawings(plan.src, Details(unit, caption="before", width=PANEL, height=TALLEST)),
            _matrix(traffic_of(plan, MOST_DRAWN), unit),
            *layout_drawings(plan.dst, Details(unit, caption="after", width=PANEL, height=TALLEST)),
        ],
        lambda columns, colours: _text(plan, dtype, columns, colours),
        width,
    )


def traffic_picture(
    title: str, notes: Sequence[str], plans: Sequence[tuple[PlanLike, int]], *, width: int = WIDTH
) -> Picture:
    """Who sends how much to whom by several plans together, each with the bytes of its elements."""
    unit = Unit(1)
    return Picture(
        title,
        notes,
        lambda: [_matrix(traffic_of_all(plans, MOST_DRAWN), unit)],
        lambda columns, colours: "\n".join([title, *notes, *_rows(traffic_of_all(plans, MOST_WRITTEN), unit)]),
        width,
    )


def summary(plan: PlanLike, unit: Unit) -> str:
    """In words: how much moves, between how many ranks."""
    senders, receivers = (len(set(layout.ranks.tolist())) for layout in (plan.src, plan.dst))
    part = percent(plan.moved / max(plan.src.size.numel(), 1))
    who = f"from {numbered(senders, 'rank')} to {receivers:,}"
    return f"{unit.phrase(plan.moved)} move {who}, {part} of the tensor; no plan could move less"


def _matrix(traffic: Traffic, unit: Unit) -> Canvas:
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
    canvas: Canvas, traffic: Traffic, at: tuple[int, int], corner: tuple[float, float], most: int, unit: Unit
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
    told = f"{sender.phrase} → {receiver.phrase}: {unit.phrase(moves)}{each}"
    with canvas.mark(told if moves else f"{sender.phrase} → {receiver.phrase}: nothing", "move"):
        canvas.rect(x + 1, y + 1, width - 2, height - 2, css="shade")
        canvas.text(middle, y + 18, unit.text(moves) if moves else "·", size=10, anchor="middle")
        if moves and not each:
            paint = colour(sender.ranks[0])
            canvas.rect(x + 5, y + height - 10, max((width - 10) * moves / most, 2.0), 4, fill=paint)


# In the terminal ------------------------------------------------------------------------------------------------------


def _text(plan: PlanLike, dtype: torch.dtype | None, width: int, colours: bool) -> str:
    unit = Unit.of(dtype)
    before, after = (layout_text(layout, dtype=dtype, width=width, colours=colours) for layout in (plan.src, plan.dst))
    return "\n".join(
        [f"before: {before}", summary(plan, unit), *_rows(traffic_of(plan, MOST_WRITTEN), unit), f"after: {after}"]
    )


def _rows(traffic: Traffic, unit: Unit) -> list[str]:
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
