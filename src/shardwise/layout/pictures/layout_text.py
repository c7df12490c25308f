"""A layout in the terminal: its boxes, and who holds how much."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from shardwise.layout.geometry import Boxes, IntArray, draw_boxes
from shardwise.layout.pictures.colours import channels, colour
from shardwise.layout.pictures.panels import panels_of
from shardwise.layout.pictures.scale import edges_of, middle_parts
from shardwise.layout.pictures.shares import equal_shares, place_shares
from shardwise.layout.pictures.words import SizeUnit, numbered, percent, ranks_text, size_text

if TYPE_CHECKING:
    from shardwise.layout.layout import Layout

MOST_PLACES = 8  # of which each has a line; of more, equal ones share it
MOST_LINES = 32
MOST_PANELS = 8
MOST_BOXES = 1 << 16  # beyond which no drawing is tried
MOST_DOWN = 16  # parts downwards, besides what is left out between the first and the last


def layout_as_text(layout: Layout, *, dtype: torch.dtype | None, width: int, colours: bool) -> str:
    """A layout drawn with lines of text, then a table of places: shards, bytes or elements, and share of the tensor."""
    unit = SizeUnit.of(dtype)
    kind = f" {str(dtype).removeprefix('torch.')}" if dtype is not None else ""
    whole, shards = unit.phrase(layout.size.numel()), numbered(len(layout), "shard")
    return "\n".join(
        [
            f"{size_text(layout.size, 'x')}{kind}, {whole} in {shards}",
            *_drawing(layout, width, colours),
            *_holders(layout, unit, colours),
        ]
    )


def _holders(layout: Layout, unit: SizeUnit, colours: bool) -> list[str]:
    held = place_shares(layout)
    rows = [(holding.place, holding, 1) for holding in held]
    if len(held) > MOST_PLACES:
        rows = [(equal.name, equal.one, len(equal.members)) for equal in equal_shares(held)]
    lines = []
    shown = rows[:MOST_LINES]
    amounts = [unit.text(one.elements) + " each" * (count > 1) for _, one, count in shown]
    broad, deep = max((len(name) for name, _, _ in shown), default=0), max(map(len, amounts), default=0)
    for (name, one, _), amount in zip(shown, amounts, strict=True):
        empty = f" ({one.empty} empty)" if one.empty else ""
        bar = "█" * round(20 * one.share) or "▏"
        line = (
            f"{name:<{broad}}  {numbered(one.shards, 'shard'):>9}{empty:<10} {amount:>{max(deep, 10)}} "
            f"{percent(one.share):>5} {painted(bar, one.rank, colours)}"
        )
        lines.append("  " + line.rstrip())
    if len(rows) > MOST_LINES:
        lines.append(f"  ... and {numbered(len(rows) - MOST_LINES, 'more line')} like these")
    return lines


def _drawing(layout: Layout, width: int, colours: bool) -> list[str]:
    if len(layout) > MOST_BOXES:
        return ["  (too many edges to draw_boxes)"]
    if not len(layout.boxes.filled):
        return ["  (no elements)"]
    ranks = layout.ranks
    found = panels_of(layout, MOST_PANELS)
    lines = []
    if found.down is not None and found.right is not None:
        lines.append(f"  dim {found.down} ↓  dim {found.right} →")
    for panel in found.panels:
        most = {found.down: MOST_DOWN, found.right: width // (len(f"rank {ranks.max()}") + 3) - 1}
        boxes, names = _shortened(layout.boxes.take(panel.rows), ranks[panel.rows], most)
        seen = boxes.select([dim for dim in (found.down, found.right) if dim is not None])
        picture = draw_boxes(seen, names, width=width - 4)
        if not picture:
            return ["  (too many edges to draw_boxes)"]
        if panel.title:
            lines.append(f"  {panel.title}")
        for rank in sorted(set(ranks[panel.rows].tolist())) if colours else []:
            label = f"rank {rank}"
            picture = [line.replace(f" {label} ", f" {painted(label, rank, True)} ") for line in picture]
        lines += [f"  {line}" for line in picture]
    return lines + [f"  {line}" for line in found.rest]


def _shortened(boxes: Boxes, ranks: IntArray, most: dict[int | None, int]) -> tuple[Boxes, list[str]]:
    """The boxes and their labels; of more parts along a dim, those in the middle are one, as long as the first."""
    begins, ends, hidden = boxes.offsets.copy(), boxes.ends.copy(), np.zeros(len(boxes), dtype=bool)
    for dim, few in most.items():
        middle = None if dim is None else middle_parts(boxes, dim, max(few, 2))
        if dim is None or middle is None:
            continue
        edges = edges_of(boxes, dim)
        first, last = (int(edges[part]) for part in middle)
        inside, shift = (begins[:, dim] >= first) & (begins[:, dim] < last), last - first - int(edges[1] - edges[0])
        begins[inside, dim], ends[inside, dim] = first, last - shift
        begins[begins[:, dim] >= last, dim] -= shift
        ends[~inside & (ends[:, dim] > last), dim] -= shift
        hidden |= inside
    members: dict[tuple[int, ...], list[int]] = {}
    for row, begin in enumerate(map(tuple, begins.tolist())):
        members.setdefault(begin, []).append(row)
    labels, several = [], sum(bool(hidden[rows[0]]) for rows in members.values()) > 1
    for rows in members.values():
        rank = int(ranks[rows[0]])
        name = f"rank {rank}" if rank >= 0 else "?"
        rest = f"… {len(rows)}" if several else f"… {ranks_text(ranks[rows].tolist())}"
        labels.append(rest if hidden[rows[0]] else name)
    chosen = np.array([rows[0] for rows in members.values()], dtype=np.int64)
    return Boxes(begins[chosen], (ends - begins)[chosen]), labels


def painted(text: str, rank: int, colours: bool) -> str:
    """The text in the colour of a rank, if there are to be colours."""
    if not colours or rank < 0:
        return text
    red, green, blue = channels(colour(rank))
    return f"\x1b[1;38;2;{red};{green};{blue}m{text}\x1b[0m"
