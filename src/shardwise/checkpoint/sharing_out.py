"""Who writes what: every box of every tensor once, by a rank that holds it, so that all write about as much.

Every rank works this out alone, and alike, from the layouts that all ranks know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shardwise.errors import CheckpointError
from shardwise.geometry import describe
from shardwise.layout import Layout
from shardwise.transfer.views import cut

SMALLEST = 2**20  # bytes of the parts that a box is cut into where several ranks hold it
PARTS = 4  # of such a box for each rank that holds it, so that those with less to write can take more


@dataclass(frozen=True, eq=False)
class Source:
    """A tensor to be written: what it is, and which rank has which of its boxes."""

    name: str
    dtype: torch.dtype
    size: torch.Size
    layout: Layout | None  # None where every rank has all of it


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank writes: a box of a source, which lies in one of its rows."""

    source: int
    row: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Held:
    """A box that several ranks hold, each as another row."""

    source: int
    box: tuple[list[int], list[int]]
    rows: dict[int, int]
    nbytes: int


def share_out(sources: Sequence[Source], ranks: Sequence[int]) -> dict[int, list[Part]]:
    """The parts that each rank writes, in the order of the sources and of their boxes."""
    parts: dict[int, list[Part]] = {rank: [] for rank in ranks}
    load = dict.fromkeys(ranks, 0)

    def give(rank: int, source: int, row: int, box: tuple[Sequence[int], Sequence[int]], nbytes: int) -> None:
        parts[rank].append(Part(source, row, tuple(box[0]), tuple(box[1])))
        load[rank] += nbytes

    several = []
    for number, source in enumerate(sources):
        for held in _boxes(number, source, load):
            if len(held.rows) > 1:
                several.append(held)
            else:
                ((rank, row),) = held.rows.items()
                give(rank, number, row, held.box, held.nbytes)
    for held in sorted(several, key=lambda held: -held.nbytes):  # the largest first, so that the small ones even out
        itemsize = sources[held.source].dtype.itemsize
        most = max(-(-held.nbytes // (len(held.rows) * PARTS)), SMALLEST) // itemsize
        for box in cut(held.box, max(most, 1)):
            rank = min(held.rows, key=lambda rank: (load[rank], rank))
            give(rank, held.source, held.rows[rank], box, torch.Size(box[1]).numel() * itemsize)
    return {rank: sorted(found, key=lambda part: (part.source, part.offsets)) for rank, found in parts.items()}


def _boxes(number: int, source: Source, here: dict[int, int]) -> Iterator[_Held]:
    """Each distinct box that holds anything, and who of these ranks has it."""
    layout = source.layout
    if layout is None:
        count = source.size.numel()
        if count:
            whole = [0] * len(source.size), list(source.size)
            yield _Held(number, whole, dict.fromkeys(here, 0), count * source.dtype.itemsize)
        return
    offsets, sizes, ranks = layout.boxes.offsets.tolist(), layout.boxes.sizes.tolist(), layout.ranks.tolist()
    nbytes = (layout.boxes.volumes * source.dtype.itemsize).tolist()
    same: dict[tuple[int, ...], dict[int, int]] = {}
    for row in layout.boxes.filled.tolist():
        same.setdefault((*offsets[row], *sizes[row]), {}).setdefault(ranks[row], row)
    for holders in same.values():
        row = next(iter(holders.values()))
        rows = {rank: held for rank, held in holders.items() if rank in here}
        if not rows:
            raise CheckpointError(
                f"{describe(offsets[row], sizes[row])} of '{source.name}' lies on {layout.place(row)}, which does not "
                f"take part: save on a group that has all its ranks, not on {sorted(here)}"
            )
        yield _Held(number, (offsets[row], sizes[row]), rows, nbytes[row])
