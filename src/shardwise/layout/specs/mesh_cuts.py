"""Which boxes each rank of a mesh holds, when axes of the mesh cut dims of a tensor as DTensor's placements do."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from shardwise.layout.geometry import Boxes
from shardwise.layout.grid import Axis
from shardwise.layout.layout import Layout
from shardwise.layout.places import Places
from shardwise.layout.specs.chunking import even_axis, even_cut

Runs = tuple[tuple[int, int], ...]  # offset and length of runs of one dim, ascending


@dataclass(frozen=True)
class AxisCut:
    """An axis of a mesh that cuts a dim into one chunk for each of its ranks.

    With ``parts``, the dim is first cut into so many chunks, and each of these into chunks for the ranks. A rank then
    holds a run of every part. This is how an axis cuts a dim that an axis further right has cut before.
    """

    axis: int
    dim: int
    parts: int = 1

    def split(self, runs: Runs, ranks: int) -> list[Runs]:
        """The runs that each rank along the axis holds of these runs."""
        parts = [_chunks(part, ranks) for part in _chunks(runs, self.parts)]
        return [_merged(itertools.chain.from_iterable(part[k] for part in parts)) for k in range(ranks)]


@lru_cache(maxsize=1024)
def mesh_layout(size: torch.Size, shape: tuple[int, ...], cuts: tuple[AxisCut, ...], places: Places) -> Layout:
    """The layout on a mesh of this shape, whose places are given in row-major order; cuts hold in their order.

    A rank has a box for each run; where several dims have several runs, one for each combination, the last dim
    changing fastest. A rank that gets nothing has an empty box at the end of the dim.
    """
    dims = {cut.axis: cut.dim for cut in cuts if cut.parts == 1}
    if len(set(dims.values())) == len(cuts):  # each dim is cut once
        each = [(dims.get(axis), count) for axis, count in enumerate(shape)]
        rule = [Axis(count) if dim is None else even_axis(dim, size[dim], count) for dim, count in each]
        return Layout.by_rule(size, rule, places)
    axes: list[list[int]] = [[] for _ in size]
    held: list[dict[tuple[int, ...], Runs]] = [{(): ((0, length),)} for length in size]
    for cut in cuts:
        axes[cut.dim].append(cut.axis)
        held[cut.dim] = {
            (*where, k): runs
            for where, before in held[cut.dim].items()
            for k, runs in enumerate(cut.split(before, shape[cut.axis]))
        }
    boxes: list[tuple[tuple[int, int], ...]] = []
    rows: list[int] = []
    for number, where in enumerate(np.ndindex(shape)):
        by_dim = [
            held[dim][tuple(where[axis] for axis in axes[dim])] or ((length, 0),) for dim, length in enumerate(size)
        ]
        mine = list(itertools.product(*by_dim))
        boxes += mine
        rows += [number] * len(mine)
    both = np.array(boxes, dtype=np.int64).reshape(len(boxes), len(size), 2)
    return Layout.of(size, Boxes(both[:, :, 0].copy(), both[:, :, 1].copy()), places.take(np.array(rows)))


def _chunks(runs: Runs, count: int) -> list[Runs]:
    """The elements of these runs, cut as `torch.chunk` cuts."""
    if count == 1:
        return [runs]
    offsets, sizes = even_cut(sum(length for _, length in runs), count)
    return [_between(runs, begin, begin + size) for begin, size in zip(offsets.tolist(), sizes.tolist(), strict=True)]


def _between(runs: Runs, begin: int, end: int) -> Runs:
    """The part between two elements, counted along the runs."""
    found, counted = [], 0
    for offset, length in runs:
        first, last = max(begin - counted, 0), min(end - counted, length)
        if first < last:
            found.append((offset + first, last - first))
        counted += length
    return tuple(found)


def _merged(runs: Iterable[tuple[int, int]]) -> Runs:
    """The same elements in as few runs as possible."""
    found: list[tuple[int, int]] = []
    for offset, length in runs:
        if found and sum(found[-1]) == offset:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((offset, length))
    return tuple(found)
