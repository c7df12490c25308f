"""The picture of a layout, or of a tensor that has one: its boxes, and who holds how much."""

from __future__ import annotations

from collections.abc import Collection

import torch

from shardwise.geometry.drawing import shown_dims
from shardwise.viz.holdings import Equals, equal_holdings, holdings
from shardwise.viz.holdings_drawing import Row, holdings_drawing, row_words
from shardwise.viz.layout_drawing import Details, layout_drawings
from shardwise.viz.layout_text import layout_text
from shardwise.viz.picture import WIDTH, Picture
from shardwise.viz.scale import cut_text
from shardwise.viz.subjects import LayoutLike
from shardwise.viz.svg import Canvas
from shardwise.viz.words import Unit, numbered, size_text


def layout_picture(
    layout: LayoutLike,
    *,
    kind: str = "Layout",
    dtype: torch.dtype | None = None,
    here: Collection[int] = (),
    width: int = WIDTH,
) -> Picture:
    """The picture of a layout; the boxes of these rows, which this rank holds, are outlined."""
    unit = Unit.of(dtype)
    return Picture(
        f"{kind} {size_text(layout.size)}",
        layout_notes(layout, dtype) + ["outlined: on this rank"] * bool(here),
        lambda: [*layout_drawings(layout, Details(unit, here)), holders(layout, unit)],
        lambda columns, colours: layout_text(layout, dtype=dtype, width=columns, colours=colours),
        width,
    )


def layout_notes(layout: LayoutLike, dtype: torch.dtype | None) -> list[str]:
    """In words: how much there is, in how many shards, and how the drawn dims are cut."""
    boxes = layout.boxes.take(layout.boxes.filled)
    whole = Unit.of(dtype).phrase(layout.size.numel())
    kind = f"{str(dtype).removeprefix('torch.')}, " if dtype is not None else ""
    held = holdings(layout)
    devices = sorted({place.device.type for place in layout.places.distinct[0]})
    ranks = len({holding.rank for holding in held})
    notes = [f"{kind}{whole}; {numbered(len(layout), 'shard')} on {numbered(ranks, 'rank')}, {', '.join(devices)}"]
    down, right = shown_dims(boxes)
    cut = [
        dim
        for dim in range(boxes.ndim)
        if dim in (down, right) or (len(boxes) and (boxes.sizes[:, dim] < layout.size[dim]).any())
    ]
    arrows = {down: " ↓", right: " →"}  # any other is sliced
    if len(boxes) and cut:
        told = [f"dim {dim}{arrows.get(dim, ' in slices:')} {cut_text(boxes, dim, layout.size)}" for dim in cut]
        notes.append("; ".join(one.replace(" ", "\xa0") for one in told))  # a line breaks between dims only
    return notes


def holders(layout: LayoutLike, unit: Unit) -> Canvas:
    """Who holds how much of a layout, as bars."""
    return holdings_drawing([_row(equal, unit) for equal in equal_holdings(holdings(layout))])


def _row(equal: Equals, unit: Unit) -> Row:
    one, count = equal.one, len(equal.members)
    amount = unit.text(one.elements)
    empty = f" ({one.empty} empty)" if one.empty else ""
    places = one.place if count == 1 else f"{equal.name} ({one.place} …), each"
    told = (
        f"{places}: {numbered(one.shards, 'shard')}{empty}, {unit.phrase(one.elements)}, {one.share:.1%} of the tensor"
    )
    return Row(equal.name, equal.ranks, row_words(amount, one.share, count), one.share, 0.0, told)
