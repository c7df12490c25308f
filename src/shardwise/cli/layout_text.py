"""How tensors lie in files, in a few words."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardwise.archive import Index, StoredTensor
from shardwise.layout import Grid, Layout
from shardwise.viz.words import numbered

DIMS = {1: ("elements",), 2: ("rows", "columns")}  # what dims are called, by their number


def layout_text(layout: Layout) -> str:
    """A layout in a few words: ``whole``, ``4 chunks of rows``, ``2 × 4 grid``, ``7 boxes``."""
    count = len(layout.pattern.filled)
    if not count:
        return "empty"
    cut = [dim for dim in range(layout.ndim) if layout.cuts(dim)]
    if not cut:
        return "whole"
    if len(cut) == 1:
        known = DIMS.get(layout.ndim, ())
        what = known[cut[0]] if known else f"dim {cut[0]}"
        return f"{numbered(count, 'chunk')} of {what}"
    if isinstance(layout.pattern, Grid):
        boxes = layout.at(layout.pattern.filled)
        shape = [len(np.unique(boxes.offsets[:, dim])) for dim in cut]
        if np.prod(shape) == count:
            return f"{' × '.join(map(str, shape))} grid" + ("" if len(cut) == layout.ndim else f" of dims {cut}")
    return numbered(count, "box")


def bytes_by_file(index: Index, tensors: Mapping[str, StoredTensor]) -> tuple[list[int], list[int]]:
    """How many bytes of these tensors lie in each file, and of how many of them some do."""
    held = np.zeros(max(len(index.files), 1), dtype=np.int64)
    counts = np.zeros_like(held)
    for tensor in tensors.values():
        files, volumes = tensor.layout.ranks, tensor.layout.pattern.all_volumes
        np.add.at(held, files, volumes * tensor.dtype.itemsize)
        counts[np.unique(files[volumes > 0])] += 1
    return held.tolist(), counts.tolist()
