"""A layout in the terminal: its boxes, and who holds how much."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from shardwise.geometry import draw
from shardwise.geometry.drawing import shown_dims
from shardwise.layout import Layout
from shardwise.viz.figures import bytes_text, colour, holdings, panels


class Sharded(Protocol):
    """A tensor that has a layout."""

    _layout: Layout
    dtype: torch.dtype


MOST_PLACES = 32  # listed below the drawing
MOST_PANELS = 8
MOST_BOXES = 4096  # beyond which no drawing is tried


def layout_text(
    layout: Layout | Sharded, *, dtype: torch.dtype = torch.float32, width: int = 76, colours: bool = False
) -> str:
    """A layout, or a sharded tensor's, drawn with lines of text, then a table of places: shards, bytes and share."""
    if not isinstance(layout, Layout):
        dtype, layout = layout.dtype, layout._layout
    size = "x".join(map(str, layout.size)) or "scalar"
    total = layout.size.numel() * dtype.itemsize
    lines = [f"{size} {str(dtype).removeprefix('torch.')}, {bytes_text(total)} in {len(layout)} shards"]
    lines += _drawing(layout, width, colours)
    held = holdings(layout, dtype)
    broad = max((len(holding.place) for holding in held), default=0)
    for holding in held[:MOST_PLACES]:
        shards = f"{holding.shards} shard" + "s" * (holding.shards != 1)
        empty = f" ({holding.empty} empty)" if holding.empty else ""
        bar = "█" * round(20 * holding.share) or "▏"
        line = (
            f"{holding.place:<{broad}}  {shards:>9}{empty:<10} {bytes_text(holding.bytes):>10} "
            f"{holding.share:>5.0%} {_painted(bar, holding.rank, colours)}"
        )
        lines.append("  " + line.rstrip())
    if len(held) > MOST_PLACES:
        lines.append(f"  ... and {len(held) - MOST_PLACES} more places")
    return "\n".join(lines)


def _drawing(layout: Layout, width: int, colours: bool) -> list[str]:
    if len(layout) > MOST_BOXES:
        return ["  (too many edges to draw)"]
    filled = layout.boxes.take(layout.boxes.filled)
    if not len(filled):
        return ["  (no elements)"]
    ranks = layout.ranks[layout.boxes.filled]
    labels = [f"rank {rank}" if rank >= 0 else "?" for rank in ranks.tolist()]
    lines = []
    down, right = shown_dims(filled)
    if down is not None and right is not None:
        lines.append(f"  dim {down} ↓  dim {right} →")
    shown = list(panels(layout, filled))
    for panel in shown[:MOST_PANELS]:
        rows = np.array(panel.rows)
        picture = draw(filled.take(rows), [labels[row] for row in panel.rows], width=width - 4)
        if not picture:
            return ["  (too many edges to draw)"]
        if panel.title:
            lines.append(f"  {panel.title}")
        for rank in sorted(set(ranks.tolist())) if colours else []:
            label = f"rank {rank}"
            picture = [line.replace(f" {label} ", f" {_painted(label, rank, True)} ") for line in picture]
        lines += [f"  {line}" for line in picture]
    if len(shown) > MOST_PANELS:
        lines.append(f"  ... and {len(shown) - MOST_PANELS} more panels")
    return lines


def _painted(text: str, rank: int, colours: bool) -> str:
    if not colours or rank < 0:
        return text
    red, green, blue = (int(colour(rank)[k : k + 2], 16) for k in (1, 3, 5))
    return f"\x1b[1;38;2;{red};{green};{blue}m{text}\x1b[0m"
