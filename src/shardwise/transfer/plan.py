"""What must go where: the boxes one has, intersected with the boxes one wants.

A plan is pure and deterministic. Every rank makes the same one alone, from two layouts that all ranks know.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from shardwise.errors import LayoutError
from shardwise.geometry import Boxes, IntArray, intersections, read_only
from shardwise.layout import Layout


@dataclass(frozen=True, eq=False)
class Plan:
    """Pieces to be moved, each from a box of the source to a box of the destination.

    Pieces are in order of source rank, destination rank and place in the destination: all that one rank sends to
    another is one run of pieces, which both read in the same order.
    """

    src: Layout
    dst: Layout
    boxes: Boxes  # each piece, in the coordinates of the whole tensor
    src_rows: IntArray
    dst_rows: IntArray
    sums: bool = False  # pieces that fall on one element are added; else each element is written once

    def __len__(self) -> int:
        return len(self.boxes)

    @cached_property
    def src_ranks(self) -> IntArray:
        """The rank that has each piece."""
        return read_only(self.src.ranks[self.src_rows])

    @cached_property
    def dst_ranks(self) -> IntArray:
        """The rank that gets each piece."""
        return read_only(self.dst.ranks[self.dst_rows])

    @property
    def ranks(self) -> list[int]:
        """All ranks that hold a box before or after."""
        return sorted(set(self.src.ranks.tolist()) | set(self.dst.ranks.tolist()))

    def reverse(self) -> Plan:
        """The same pieces on their way back, adding up what comes from several replicas."""
        order = _order(self.dst_ranks, self.src_ranks, self.src_rows, self.dst_rows)
        boxes = self.boxes.take(order)
        return Plan(self.dst, self.src, boxes, self.dst_rows[order], self.src_rows[order], sums=not self.sums)

    # What one rank has to do --------------------------------------------------------------------------------------

    @cached_property
    def _runs(self) -> dict[tuple[int, int], range]:
        """For each pair of ranks, its run of pieces."""
        if not len(self):
            return {}
        pairs = np.stack([self.src_ranks, self.dst_ranks], axis=1)
        starts = np.flatnonzero(np.r_[True, (pairs[1:] != pairs[:-1]).any(axis=1)])
        stops = np.r_[starts[1:], len(pairs)]
        return {
            (int(pairs[start, 0]), int(pairs[start, 1])): range(int(start), int(stop))
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        }

    def pieces(self, src_rank: int, dst_rank: int) -> range:
        """What one rank has for another."""
        return self._runs.get((src_rank, dst_rank), range(0))

    def destinations(self, rank: int) -> list[int]:
        """The other ranks that this one sends to: the next one first, so that not all send to the same one."""
        others = [dst for src, dst in self._runs if src == rank and dst != rank]
        return sorted(others, key=lambda other: (other <= rank, other))

    def sources(self, rank: int) -> list[int]:
        """The other ranks that this one receives from, in the order in which they come to it."""
        others = [src for src, dst in self._runs if dst == rank and src != rank]
        return sorted(others, key=lambda other: (other >= rank, -other))

    @cached_property
    def sent_as_it_lies(self) -> npt.NDArray[np.bool_]:
        """For each piece, whether it is one run of memory at its source; else it must be packed."""
        return _lies_whole(self.boxes, self.src.boxes.take(self.src_rows))

    @cached_property
    def lands_as_it_comes(self) -> npt.NDArray[np.bool_]:
        """For each piece, whether it is one run of memory at its destination; else it must be unpacked."""
        return _lies_whole(self.boxes, self.dst.boxes.take(self.dst_rows))

    # Figures --------------------------------------------------------------------------------------------------------

    @cached_property
    def traffic(self) -> dict[tuple[int, int], int]:
        """Elements that go from one rank to another, for each pair with any; local ones are from a rank to itself."""
        volumes = self.boxes.volumes
        return {pair: int(volumes[run.start : run.stop].sum()) for pair, run in self._runs.items()}

    def sent(self, rank: int) -> int:
        """Elements that a rank sends to others."""
        return sum(count for (src, dst), count in self.traffic.items() if src == rank != dst)

    def received(self, rank: int) -> int:
        """Elements that a rank receives from others."""
        return sum(count for (src, dst), count in self.traffic.items() if dst == rank != src)

    @cached_property
    def moved(self) -> int:
        """Elements that travel between ranks."""
        return sum(count for (src, dst), count in self.traffic.items() if src != dst)

    @cached_property
    def lower_bound(self) -> int:
        """The fewest elements that any plan could move: what each rank wants and does not have."""
        total = 0
        for rank in self.ranks:
            wanted = self.dst.boxes.take(np.array(self.dst.rows_on(rank), dtype=np.int64))
            there = self.src.boxes.take(np.array(self.src.rows_on(rank), dtype=np.int64))
            i, j = intersections(there, wanted)
            low = np.maximum(there.offsets[i], wanted.offsets[j])
            high = np.minimum(there.ends[i], wanted.ends[j])
            total += int(wanted.volumes.sum()) - int(np.prod(high - low, axis=1).sum())
        return total

    def explain(self, *, itemsize: int = 4) -> str:
        """In plain words: who sends how much to whom, what stays, and how that compares with the least possible."""
        whole = self.src.size.numel() * itemsize
        lines = [
            f"{tuple(self.src.size)} from {len(self.src)} boxes to {len(self.dst)}: {len(self)} pieces, "
            f"{self.moved * itemsize:,} bytes move ({self.moved * itemsize / max(whole, 1):.1%} of the tensor), "
            f"at least {self.lower_bound * itemsize:,} must.",
            f"{int(self.sent_as_it_lies.sum())} pieces lie in one run of memory at their source, "
            f"{int(self.lands_as_it_comes.sum())} at their destination; the others are packed.",
        ]
        for rank in self.ranks:
            out = [f"{self.traffic[rank, d] * itemsize:,} to rank {d}" for d in self.destinations(rank)]
            stays = self.traffic.get((rank, rank), 0) * itemsize
            lines.append(f"rank {rank} keeps {stays:,} bytes and sends {', '.join(out) or 'nothing'}.")
        return "\n".join(lines)


@lru_cache(maxsize=256)
def make_plan(src: Layout, dst: Layout) -> Plan:
    """The pieces that turn one layout into the other, moving nothing that is already there.

    Replicas in the source share the load: of each box that several ranks hold, each sends an equal part. A replicated
    destination receives everywhere.
    """
    if src.size != dst.size:
        raise LayoutError(f"a tensor of size {tuple(src.size)} cannot become one of size {tuple(dst.size)}")
    replicas = _Replicas(src)
    box, dst_rows = intersections(replicas.boxes, dst.boxes)
    low = np.maximum(replicas.boxes.offsets[box], dst.boxes.offsets[dst_rows])
    high = np.minimum(replicas.boxes.ends[box], dst.boxes.ends[dst_rows])
    src_rows = replicas.first[box]
    if replicas.any:
        src_rows, dst_rows, low, high = replicas.share(box, dst_rows, low, high, dst)
    order = _order(src.ranks[src_rows], dst.ranks[dst_rows], dst_rows, src_rows)
    low, high = low[order], high[order]
    return Plan(src, dst, Boxes(low, high - low), src_rows[order], dst_rows[order])


def _order(*keys: IntArray) -> IntArray:
    """Sorted by the first key, then the second, and so on."""
    return np.lexsort(keys[::-1])


class _Replicas:
    """The distinct boxes of a source, and who holds each."""

    def __init__(self, src: Layout) -> None:
        self.src = src
        both = np.concatenate([src.boxes.offsets, src.boxes.sizes], axis=1)
        if len(src) <= 1:
            first, number = np.arange(len(src)), np.arange(len(src))
        else:
            _, first, number = np.unique(both, axis=0, return_index=True, return_inverse=True)
            number = number.reshape(-1)
        self.first: IntArray = first.astype(np.int64)  # for each distinct box, one row that holds it
        self.boxes = src.boxes.take(self.first)
        self.any = len(self.first) < len(src)
        order = _order(number, src.ranks)
        self.holders = order  # rows, box by box, by rank
        self.counts: IntArray = np.bincount(number, minlength=len(self.first)).astype(np.int64)
        self.starts = np.cumsum(self.counts) - self.counts
        self.number = number

    def share(
        self, box: IntArray, dst_rows: IntArray, low: IntArray, high: IntArray, dst: Layout
    ) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Each piece from the destination's own replica where it has one, else a part from every holder."""
        span = int(max(self.src.ranks.max(), dst.ranks.max())) + 2
        held = self.number[self.holders] * span + self.src.ranks[self.holders]
        wanted = box * span + dst.ranks[dst_rows]
        at = np.minimum(np.searchsorted(held, wanted), len(held) - 1)
        local = held[at] == wanted
        far = np.flatnonzero(~local)
        # A scalar cannot be shared: its first holder sends it.
        parts = self.counts[box[far]] if self.src.ndim else np.ones(len(far), dtype=np.int64)
        piece = np.repeat(far, parts)
        part = np.arange(len(piece)) - np.repeat(np.cumsum(parts) - parts, parts)
        part_low, part_high = _part(low[piece], high[piece], part, np.repeat(parts, parts))
        some = (part_low < part_high).all(axis=1)
        piece, part, part_low, part_high = piece[some], part[some], part_low[some], part_high[some]
        return (
            np.concatenate([self.holders[at[local]], self.holders[self.starts[box[piece]] + part]]),
            np.concatenate([dst_rows[local], dst_rows[piece]]),
            np.concatenate([low[local], part_low]),
            np.concatenate([high[local], part_high]),
        )


def _part(low: IntArray, high: IntArray, part: IntArray, count: IntArray) -> tuple[IntArray, IntArray]:
    """One of so many even parts of each piece, cut along its longest dim."""
    if not low.shape[1]:
        return low, high
    dim = np.argmax(high - low, axis=1)
    rows = np.arange(len(low))
    begin, length = low[rows, dim], (high - low)[rows, dim]
    low, high = low.copy(), high.copy()
    low[rows, dim], high[rows, dim] = begin + length * part // count, begin + length * (part + 1) // count
    return low, high


def _lies_whole(pieces: Boxes, boxes: Boxes) -> npt.NDArray[np.bool_]:
    """Which pieces are one run of memory in the boxes they are parts of."""
    full, single = pieces.sizes == boxes.sizes, pieces.sizes == 1
    ones = np.ones((len(pieces), 1), dtype=bool)
    before = np.concatenate([ones, np.cumprod(single, axis=1, dtype=bool)], axis=1)[:, :-1]
    behind = np.concatenate([np.cumprod(full[:, ::-1], axis=1, dtype=bool)[:, ::-1], ones], axis=1)[:, 1:]
    whole: npt.NDArray[np.bool_] = (before & behind).any(axis=1) if pieces.ndim else ones[:, 0]
    return whole


def cut(box: tuple[list[int], list[int]], most: int) -> Iterator[tuple[list[int], list[int]]]:
    """A box in pieces of at most so many elements, cut along its first dims so that each is as whole as can be."""
    offsets, sizes = box
    rest = 1
    for size in sizes:
        rest *= size
    if rest <= most or rest <= 1:
        yield box
        return
    dim = next(k for k, size in enumerate(sizes) if size > 1)
    row = rest // sizes[dim]
    step = max(most // row, 1)
    for begin in range(0, sizes[dim], step):
        inner_offsets, inner_sizes = list(offsets), list(sizes)
        inner_offsets[dim] += begin
        inner_sizes[dim] = min(step, sizes[dim] - begin)
        yield from cut((inner_offsets, inner_sizes), most)
