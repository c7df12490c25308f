"""Ranks that are gone: what of a state is left without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardwise.checkpoint.local import Local
from shardwise.errors import ProcessGroupError, StateLostError
from shardwise.layout import Layout, Places
from shardwise.layout.geometry import IntArray

MOST_LISTED = 20  # tensors
MOST_BOXES = 3  # of a tensor


def require_held(tensors: Mapping[str, Local], ranks: Sequence[int], lost: Sequence[int]) -> None:
    """Raise unless these ranks have every element; what is wrong is one error, which names the boxes that are lost.

    Ranks are those that the layouts speak of.
    """
    lines, everyone = [], np.array([*ranks, *lost], dtype=np.int64)
    for name, local in tensors.items():
        if local.plain:
            continue
        holders = local.layout.ranks[local.layout.boxes.filled]
        outside = holders[~np.isin(holders, everyone)]
        if len(outside):
            rank = int(outside[0])
            raise ProcessGroupError(
                f"'{name}' has boxes on rank {rank}, which is not in the group, or gives no old state; nothing was "
                f"moved: give a group with all ranks that have it, or, if rank {rank} is gone, lost=[{rank}]"
            )
        gone = _gone(local.layout, lost) if lost else []
        if gone:
            boxes = [f"{local.layout.boxes.describe(row)} of rank {local.layout.ranks[row]}" for row in gone]
            more = f" and {len(boxes) - MOST_BOXES} more" if len(boxes) > MOST_BOXES else ""
            lines.append(f"'{name}': {', '.join(boxes[:MOST_BOXES])}{more}")
    if lines:
        others = [f"and {len(lines) - MOST_LISTED} more"] if len(lines) > MOST_LISTED else []
        raise StateLostError(
            f"of {len(lines)} tensors, parts were only on the ranks that are lost; nothing was moved:\n  "
            + "\n  ".join([*lines[:MOST_LISTED], *others])
            + "\n  (load the last checkpoint into the new state with shardwise.load or Checkpoints.resume)"
        )


@dataclass(frozen=True, eq=False)
class Survivors:
    """The ranks that are left, as layouts speak of them, and those that they are now."""

    before: IntArray  # ascending
    now: IntArray

    @staticmethod
    def of(numbers: Mapping[int, int]) -> Survivors:
        """Those that have these numbers now."""
        return Survivors(*(np.array(side, dtype=np.int64) for side in zip(*sorted(numbers.items()), strict=True)))


def surviving(
    layout: Layout, tensors: Mapping[int, torch.Tensor], survivors: Survivors
) -> tuple[Layout, dict[int, torch.Tensor]]:
    """A layout without the boxes of lost ranks, on the ranks of now, and the local tensors by their rows of it."""
    kept = np.flatnonzero(np.isin(layout.ranks, survivors.before))
    if len(kept) < len(layout):
        number = {int(row): at for at, row in enumerate(kept)}
        layout, tensors = layout.chosen(kept), {number[row]: tensor for row, tensor in tensors.items()}
    ranks = survivors.now[np.searchsorted(survivors.before, layout.ranks)]
    if (ranks != layout.ranks).any():
        layout = layout.on(Places.on_ranks(ranks, "cpu"))
    return layout, dict(tensors)


def _gone(layout: Layout, lost: Sequence[int]) -> list[int]:
    """A row for each box that only lost ranks have."""
    dead = np.isin(layout.ranks, lost)
    if not dead.any():
        return []
    table: IntArray = np.concatenate([layout.boxes.offsets, layout.boxes.sizes], axis=1)
    held = {tuple(row) for row in table[~dead].tolist()}
    found: dict[tuple[int, ...], int] = {}
    for row in layout.boxes.filled.tolist():
        box = tuple(table[row].tolist())
        if dead[row] and box not in held:
            found.setdefault(box, row)
    return list(found.values())
