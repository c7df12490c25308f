"""Do boxes make up a tensor? If not, an error that names and draws what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from shardwise.errors import GapError, LayoutError, OverlapError
from shardwise.geometry import Boxes, describe, draw, find_gap, find_overlap

MOST_DRAWN = 24  # shards in the drawing of a gap


def require_inside(boxes: Boxes, size: torch.Size, name: Callable[[int], str]) -> None:
    """Raise unless the boxes have the tensor's number of dims and end inside it, in dims that they are not empty in."""
    if boxes.ndim != len(size):
        raise LayoutError(f"Rank of tensor is {len(size)}, but shards rank is {boxes.ndim}")
    beyond = boxes.ends > np.array(size, dtype=np.int64)
    if beyond.any() and len(found := np.argwhere(beyond & (boxes.sizes > 0))):
        row, dim = (int(k) for k in found[0])
        raise LayoutError(
            f"Shard offset {boxes.offsets[row, dim]} and length {boxes.sizes[row, dim]} "
            f"exceeds tensor dim: {size[dim]} (dim {dim}) for shard {name(row)}"
        )


def require_disjoint(boxes: Boxes, name: Callable[[int], str]) -> None:
    """Raise unless no two boxes share an element; the error names the two and draws what they share."""
    found = find_overlap(boxes)
    if found is None:
        return
    first, second, region = found
    common = Boxes.parse([region[0]], [region[1]], boxes.ndim)
    pair = boxes.take(np.array([first, second]))
    scene = Boxes(np.concatenate([pair.offsets, common.offsets]), np.concatenate([pair.sizes, common.sizes]))
    picture = "\n".join(draw(scene, [str(first), str(second), "both"], width=48))
    raise OverlapError(
        f"Shards {name(first)} and {name(second)} overlap: both hold {describe(*region)}\n{picture}".rstrip()
    )


def require_cover(boxes: Boxes, size: torch.Size) -> None:
    """Raise unless the boxes, which lie inside the tensor and do not overlap, hold every element of it."""
    if int(boxes.volumes.sum()) == math.prod(size):
        return
    gap = find_gap(boxes, size)
    if gap is None:
        raise GapError(
            f"Total volume of shards: {int(boxes.volumes.sum())} does not match tensor volume: {math.prod(size)}, "
            "in other words all the individual shards do not cover the entire tensor, or they overlap"
        )
    scene = Boxes(np.append(boxes.offsets, [gap[0]], axis=0), np.append(boxes.sizes, [gap[1]], axis=0))
    labels = [str(row) for row in range(len(boxes))] + ["gap"]
    picture = "\n".join(draw(scene, labels, width=48)) if len(boxes) <= MOST_DRAWN else ""
    raise GapError(
        f"Total volume of shards: {int(boxes.volumes.sum())} does not match tensor volume: {math.prod(size)}, "
        "in other words all the individual shards do not cover the entire tensor: "
        f"no shard holds {describe(*gap)}\n{picture}".rstrip()
    )
