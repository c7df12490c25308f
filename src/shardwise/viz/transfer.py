"""A transfer plan in the terminal: the layouts before and after, and who sends how much to whom."""

from __future__ import annotations

import torch

from shardwise.transfer import Plan
from shardwise.transfer.plan import MOST_LISTED
from shardwise.viz.figures import bytes_text
from shardwise.viz.text import layout_text

MOST_RANKS = 16  # in the table


def plan_text(plan: Plan, *, dtype: torch.dtype = torch.float32, width: int = 76, colours: bool = False) -> str:
    """Before, the bytes from each rank (down) to each rank (across), and after; what stays is in brackets."""
    moved, least = (bytes_text(count * dtype.itemsize) for count in (plan.moved, plan.lower_bound))
    is_small = len(plan.ranks) <= MOST_LISTED
    parts = [
        "before: " + layout_text(plan.src, dtype=dtype, width=width, colours=colours),
        f"{moved} move{f' in {len(plan)} pieces' if is_small else ''}; at least {least} must",
        *_matrix(plan, dtype.itemsize),
        "after: " + layout_text(plan.dst, dtype=dtype, width=width, colours=colours),
    ]
    return "\n".join(parts)


def _matrix(plan: Plan, itemsize: int) -> list[str]:
    ranks = plan.ranks
    if len(ranks) > MOST_RANKS:
        return [f"  (a table of {len(ranks)} ranks would be too large)"]
    rows = [["", *(f"to {rank}" for rank in ranks)]]
    for src in ranks:
        row = [f"from {src}"]
        for dst in ranks:
            count = plan.traffic.get((src, dst), 0) * itemsize
            text = bytes_text(count) if count else "·"
            row.append(f"[{text}]" if src == dst and count else text)
        rows.append(row)
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return ["  " + "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
