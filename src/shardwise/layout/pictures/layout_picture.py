"""The picture of a layout, or of a tensor that has one: its boxes, and who holds how much."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from shardwise.layout.geometry.drawing import shown_dims
from shardwise.layout.pictures.layout_drawing import Details, layout_drawings
from shardwise.layout.pictures.layout_text import layout_as_text
from shardwise.layout.pictures.picture import WIDTH, Picture
from shardwise.layout.pictures.scale import cut_text
from shardwise.layout.pictures.shares import EqualShares, ShareRow, equal_shares, place_shares, row_text, shares_drawing
from shardwise.layout.pictures.svg import Canvas
from shardwise.layout.pictures.words import SizeUnit, numbered, size_text

if TYPE_CHECKING:
    from shardwise.layout.layout import Layout


def layout_picture(
    layout: Layout,
    *,
    kind: str = "Layout",
    dtype: torch.dtype | None = None,
    here: Collection[int] = (),
    width: int = WIDTH,
) -> Picture:
    """The picture of a layout; the boxes of these rows, which this rank holds, are outlined."""
    unit = SizeUnit.of(dtype)
    return Picture(
        f"{kind} {size_text(layout.size)}",
        layout_notes(layout, dtype) + ["outlined: on this rank"] * bool(here),
        lambda: [*layout_drawings(layout, Details(unit, here)), _bars(layout, unit)],
        lambda columns, colours: layout_as_text(layout, dtype=dtype, width=columns, colours=colours),
        width,
    )


def layout_notes(layout: Layout, dtype: torch.dtype | None) -> list[str]:
    """In words: how much there is, in how many shards, and how the drawn dims are cut."""
    boxes = layout.boxes.take(layout.boxes.filled)
    whole = SizeUnit.of(dtype).phrase(layout.size.numel())
    kind = f"{str(dtype).removeprefix('torch.')}, " if dtype is not None else ""
    held = place_shares(layout)
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
        cuts = [f"dim {dim}{arrows.get(dim, ' in slices:')} {cut_text(boxes, dim, layout.size)}" for dim in cut]
        notes.append("; ".join(one.replace(" ", "\xa0") for one in cuts))  # a line breaks between dims only
    return notes


def _bars(layout: Layout, unit: SizeUnit) -> Canvas:
    return shares_drawing([_row(equal, unit) for equal in equal_shares(place_shares(layout))])


def _row(equal: EqualShares, unit: SizeUnit) -> ShareRow:
    one, count = equal.one, len(equal.members)
    amount = unit.text(one.elements)
    empty = f" ({one.empty} empty)" if one.empty else ""
    places = one.place if count == 1 else f"{equal.name} ({one.place} …), each"
    tooltip = (
        f"{places}: {numbered(one.shards, 'shard')}{empty}, {unit.phrase(one.elements)}, {one.share:.1%} of the tensor"
    )
    return ShareRow(equal.name, equal.ranks, row_text(amount, one.share, count), one.share, 0.0, tooltip)
