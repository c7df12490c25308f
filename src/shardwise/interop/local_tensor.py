"""The one local tensor of a DTensor, and the boxes of a rank that it fills."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shardwise.geometry import Boxes


def held_size(boxes: Boxes) -> list[int]:
    """The size of the one local tensor of a DTensor that fills all these boxes of a rank."""
    return [sum(lengths) for lengths in _lengths(boxes)]


def cut_up(local: torch.Tensor, boxes: Boxes) -> list[torch.Tensor]:
    """The parts of a DTensor's local tensor that fill these boxes, as views."""
    parts = [local]
    for dim, lengths in enumerate(_lengths(boxes)):
        if len(lengths) > 1:
            parts = [piece for part in parts for piece in torch.split_with_sizes(part, lengths, dim)]
    return parts


def put_together(parts: Sequence[torch.Tensor], boxes: Boxes) -> torch.Tensor:
    """A DTensor's local tensor of parts that fill these boxes: itself when there is one."""
    joined = list(parts)
    for dim, lengths in reversed(list(enumerate(_lengths(boxes)))):
        count = len(lengths)
        if count > 1:
            joined = [torch.cat(joined[k : k + count], dim) for k in range(0, len(joined), count)]
    return joined[0]


def _lengths(boxes: Boxes) -> list[list[int]]:
    """For each dim, how long its stretches are."""
    first = [np.unique(boxes.offsets[:, dim], return_index=True)[1] for dim in range(boxes.ndim)]
    return [boxes.sizes[rows, dim].tolist() for dim, rows in enumerate(first)]
