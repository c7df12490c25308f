"""A layout in a notebook: an SVG drawing beside a table of places."""

from __future__ import annotations

from html import escape

import torch

from shardwise.geometry import Boxes, describe
from shardwise.geometry.drawing import shown_dims
from shardwise.layout import Layout
from shardwise.viz.figures import bytes_text, colour, holdings, panels

MOST_PLACES = 64  # in the table
MOST_BOXES = 4096  # in one drawing
MOST_PANELS = 16
LONGEST = 360  # pixels of the longer side
SHORTEST = 60
TITLE = 18


def layout_html(layout: Layout, *, dtype: torch.dtype, here: tuple[int, ...] = ()) -> str:
    """The drawing and a table of places, as an HTML fragment; the boxes of this rank are outlined."""
    size = " × ".join(map(str, layout.size)) or "scalar"
    total = bytes_text(layout.size.numel() * dtype.itemsize)
    places = holdings(layout, dtype)
    rows = "".join(
        f'<tr><td><span style="color:{colour(max(held.rank, 0))}">■</span> {escape(held.place)}</td>'
        f'<td style="text-align:right">{held.shards}</td>'
        f'<td style="text-align:right">{bytes_text(held.bytes)}</td>'
        f'<td style="text-align:right">{held.share:.0%}</td></tr>'
        for held in places[:MOST_PLACES]
    )
    if len(places) > MOST_PLACES:
        rows += f'<tr><td colspan="4">… and {len(places) - MOST_PLACES} more places</td></tr>'
    return (
        f"<div><div><b>ShardedTensor</b> {size}, {escape(str(dtype))}, {total}</div>"
        f'<div style="display:flex;gap:1.5em;align-items:flex-start">{layout_svg(layout, here=here)}'
        "<table><tr><th>placement</th><th>shards</th><th>bytes</th><th>share</th></tr>"
        f"{rows}</table></div></div>"
    )


def layout_svg(layout: Layout, *, here: tuple[int, ...] = ()) -> str:
    """The boxes in the two dims that are cut most, one panel for each interval in the others."""
    filled = layout.boxes.filled
    if not len(filled) or len(filled) > MOST_BOXES:
        return ""
    boxes = layout.boxes.take(filled)
    down, right = shown_dims(boxes)
    height, width = (1 if dim is None else max(layout.size[dim], 1) for dim in (down, right))
    scale = LONGEST / max(height, width)
    across, deep = (max(extent * scale, SHORTEST) for extent in (width, height))
    parts, top = [], 0.0
    for panel in list(panels(layout, boxes))[:MOST_PANELS]:
        if panel.title:
            parts.append(f'<text x="1" y="{top + TITLE - 5:.1f}">{panel.title}</text>')
            top += TITLE
        for row in sorted(panel.rows, key=lambda row: int(filled[row]) in here):  # outlined ones on top
            x, w = _stretch(boxes, row, right, across / width)
            y, h = _stretch(boxes, row, down, deep / height)
            original = int(filled[row])
            parts.append(_box(layout, original, (x + 2, y + top + 2, w, h), original in here))
        top += deep + 6
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{across + 4:.0f}" height="{top:.0f}" '
        f'font-family="sans-serif" font-size="12">{"".join(parts)}</svg>'
    )


def _stretch(boxes: Boxes, row: int, dim: int | None, scale: float) -> tuple[float, float]:
    if dim is None:
        return 0.0, scale
    return float(boxes.offsets[row, dim]) * scale, float(boxes.sizes[row, dim]) * scale


def _box(layout: Layout, row: int, frame: tuple[float, float, float, float], here: bool) -> str:
    x, y, w, h = frame
    place, rank = layout.place(row), int(layout.ranks[row])
    title = f"{describe(layout.boxes.offsets[row], layout.boxes.sizes[row])} on {place}"
    edge = 'stroke="#000" stroke-width="2.5"' if here else 'stroke="#fff" stroke-width="1"'
    label = f"rank {rank}" if w > 48 else str(rank)
    text = ""
    if rank >= 0 and w > 8 * len(label) and h > 14:
        middle = f'x="{x + w / 2:.1f}" y="{y + h / 2 + 4:.1f}"'
        text = f'<text {middle} text-anchor="middle" fill="#fff">{label}</text>'
    return (
        f'<g><title>{escape(title)}</title><rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" '
        f'fill="{colour(max(rank, 0))}" fill-opacity="0.9" {edge}/>{text}</g>'
    )
