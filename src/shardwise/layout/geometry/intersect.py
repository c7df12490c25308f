"""Which boxes of one set meet which boxes of another, near-linear in boxes plus meetings.

Where one of the sets is small, every pair is tried. Else there are three ways, by how many dims tell the boxes apart:

* none: every pair meets;
* one: sort the starts; the boxes that start inside an interval are a contiguous run;
* more: cut space in two, all nodes of one depth at once, until a node holds so few boxes that trying every pair
  in it costs no more than looking at them, or until a cut no longer parts them. Each node is cut in the dim that
  parts its boxes best. A pair is reported by the one node that holds the first corner of its intersection.

Candidate pairs are produced in batches, so memory stays bounded however many there are, and a caller that needs
only one pair can stop early.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.layout.geometry.boxes import Boxes, IntArray

BATCH = 1 << 21  # candidate pairs looked at together
BLOCK = 1 << 15  # pairs tried at once, few enough to stay in a cache
PAIRS_PER_BOX = 256  # every pair is tried when that is at most so many for each box: cheaper than any cut
PAIRS_PER_ENTRY = 16  # a node is small enough when trying all pairs costs at most this per box in it

NEVER = np.iinfo(np.int64).max

Pairs = tuple[IntArray, IntArray]
Mask = npt.NDArray[np.bool_]


def intersections(a: Boxes, b: Boxes) -> Pairs:
    """Row pairs ``(i, j)``, in order, for which ``a[i]`` and ``b[j]`` share an element."""
    batches = list(iter_intersections(a, b))
    if not batches:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    i, j = batches[0] if len(batches) == 1 else map(np.concatenate, zip(*batches, strict=True))
    order = np.argsort(i * len(b) + j)
    return i[order], j[order]


def iter_intersections(a: Boxes, b: Boxes) -> Iterator[Pairs]:
    """The same pairs, each once, in batches and in no particular order (but the same order on every rank)."""
    if len(a) * len(b) <= PAIRS_PER_BOX * (len(a) + len(b)):
        yield from _tried_pairs(a, b)
        return
    rows_a, rows_b = a.filled, b.filled
    if not len(rows_a) or not len(rows_b):
        return
    a, b = a.take(rows_a), b.take(rows_b)
    dims = _telling_dims(a, b)
    a, b = a.select(dims), b.select(dims)
    if len(dims) == 0:
        found = _every_pair(len(a), len(b))
    elif len(dims) == 1:
        found = _interval_pairs(a, b)
    else:
        found = _tree_pairs(a, b)
    for i, j in found:
        if len(i):
            yield rows_a[i], rows_b[j]


def _tried_pairs(a: Boxes, b: Boxes) -> Iterator[Pairs]:
    """Try every pair: a few boxes of the smaller set with all of the larger at a time."""
    if len(a) > len(b):
        yield from ((i, j) for j, i in _tried_pairs(b, a))
        return
    step = max(BLOCK // max(len(b), 1), 1)
    for first in range(0, len(a), step):
        low, high = a.offsets[first : first + step, None], a.ends[first : first + step, None]
        meets = np.ones((len(low), len(b)), dtype=bool)
        for dim in range(a.ndim):
            meets &= np.maximum(low[..., dim], b.offsets[:, dim]) < np.minimum(high[..., dim], b.ends[:, dim])
        i, j = np.divmod(np.flatnonzero(meets), len(b))
        yield i + first, j


def _telling_dims(a: Boxes, b: Boxes) -> list[int]:
    """Dims in which not all boxes are the same interval."""
    offset, end = a.offsets[0], a.ends[0]
    differs = np.zeros(a.ndim, dtype=bool)
    for boxes in (a, b):
        differs |= (boxes.offsets != offset).any(axis=0) | (boxes.ends != end).any(axis=0)
    return [int(dim) for dim in np.flatnonzero(differs)]


def _runs(starts: IntArray, stops: IntArray) -> Iterator[Pairs]:
    """For each row, the run of indices ``[start, stop)``: (row, index) pairs, in batches of bounded size."""
    lengths = np.maximum(stops - starts, 0)
    totals = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        done = int(totals[first - 1]) if first else 0
        last = max(int(np.searchsorted(totals, done + BATCH, side="right")), first + 1)
        length = lengths[first:last]
        row = np.repeat(np.arange(first, last), length)
        begin = np.repeat(starts[first:last] - (np.cumsum(length) - length), length)
        yield row, begin + np.arange(len(row))
        first = last


def _every_pair(count_a: int, count_b: int) -> Iterator[Pairs]:
    yield from _runs(np.zeros(count_a, dtype=np.int64), np.full(count_a, count_b))


def _interval_pairs(a: Boxes, b: Boxes) -> Iterator[Pairs]:
    """Pairs of intervals that meet: one of the two starts inside the other, and we ask each way once."""
    low_a, high_a = a.offsets[:, 0], a.ends[:, 0]
    low_b, high_b = b.offsets[:, 0], b.ends[:, 0]
    order_a, order_b = np.argsort(low_a, kind="stable"), np.argsort(low_b, kind="stable")
    sorted_a, sorted_b = low_a[order_a], low_b[order_b]
    starts, stops = np.searchsorted(sorted_b, low_a, "left"), np.searchsorted(sorted_b, high_a, "left")
    for i, k in _runs(starts, stops):
        yield i, order_b[k]
    starts, stops = np.searchsorted(sorted_a, low_b, "right"), np.searchsorted(sorted_a, high_b, "left")
    for j, k in _runs(starts, stops):
        yield order_a[k], j


class _Side:
    """One set of boxes, spread over the nodes of the current depth: an entry is a box seen in a node."""

    def __init__(self, low: IntArray, high: IntArray) -> None:
        self.low, self.high = low, high  # [dim][box], in ranks of edges
        self.box = np.arange(low.shape[1])
        self.node = np.zeros(low.shape[1], dtype=np.int64)

    def keep(self, chosen: IntArray, node: IntArray) -> None:
        """Keep these entries, now in these nodes."""
        self.box, self.node = self.box[chosen], node

    def move(self, alive: Mask) -> None:
        """Keep the entries of these nodes, which are numbered anew."""
        chosen = np.flatnonzero(alive[self.node])
        self.keep(chosen, (np.cumsum(alive) - 1)[self.node[chosen]])

    def counts(self, nodes: int, chosen: Mask | None = None) -> IntArray:
        """Entries per node, of all or of the chosen ones."""
        node = self.node if chosen is None else self.node[chosen]
        return np.bincount(node, minlength=nodes).astype(np.int64)


@dataclass
class _Cut:
    """The best cut found so far for each node: where, and how many pairs would be left to try."""

    dim: IntArray
    at: IntArray
    pairs: IntArray


def _tree_pairs(a: Boxes, b: Boxes) -> Iterator[Pairs]:
    low_a, high_a, low_b, high_b, cells = _ranks_of_edges(a, b)
    left, right = _Side(low_a, high_a), _Side(low_b, high_b)
    node_low, node_high = np.zeros((1, len(cells)), dtype=np.int64), cells[None, :]
    vain = np.zeros(1, dtype=np.int64)  # how many cuts in a row have not paid; some pay only together
    while len(node_low):
        nodes = len(node_low)
        counts = left.counts(nodes), right.counts(nodes)
        pairs = counts[0] * counts[1]
        small = pairs <= PAIRS_PER_ENTRY * (counts[0] + counts[1])
        yield from _leaf_pairs(left, right, small, node_low)
        for side in (left, right):
            side.move(~small)
        node_low, node_high, pairs, vain = node_low[~small], node_high[~small], pairs[~small], vain[~small]
        cut = _best_cut(left, right, node_low, node_high)
        vain = np.where(cut.pairs >= pairs, vain + 1, 0)
        stuck = (vain > 2 * len(cells)) | (cut.pairs == NEVER)
        yield from _leaf_pairs(left, right, stuck, node_low)
        node_low, node_high, vain = _halve(left, right, cut, ~stuck, node_low, node_high, vain)


def _ranks_of_edges(a: Boxes, b: Boxes) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """Coordinates replaced by their rank among the distinct edges of their dim, so that cuts are balanced."""
    corners = [a.offsets, a.ends, b.offsets, b.ends]
    columns: list[list[IntArray]] = [[] for _ in corners]
    cells = []
    for dim in range(a.ndim):
        edges = np.unique(np.concatenate([corner[:, dim] for corner in corners]))
        cells.append(len(edges) - 1)
        for corner, column in zip(corners, columns, strict=True):
            column.append(np.searchsorted(edges, corner[:, dim]))
    low_a, high_a, low_b, high_b = (np.stack(column) for column in columns)
    return low_a, high_a, low_b, high_b, np.array(cells, dtype=np.int64)


def _best_cut(left: _Side, right: _Side, node_low: IntArray, node_high: IntArray) -> _Cut:
    """For each node the cut, at the mean of the edges inside it, that leaves the fewest pairs to try."""
    nodes, ndim = node_low.shape
    best = _Cut(*(np.full(nodes, value) for value in (0, 0, NEVER)))
    for dim in range(ndim):
        begin, end = node_low[:, dim], node_high[:, dim]
        edges, total = np.zeros(nodes), np.zeros(nodes)
        for side in (left, right):
            for edge in (side.low[dim][side.box], side.high[dim][side.box]):
                inside = (edge > begin[side.node]) & (edge < end[side.node])
                node = side.node[inside]
                edges += np.bincount(node, minlength=nodes)
                total += np.bincount(node, weights=edge[inside], minlength=nodes)
        at = (total / np.maximum(edges, 1)).astype(np.int64)
        below, above = np.ones(nodes, dtype=np.int64), np.ones(nodes, dtype=np.int64)
        for side in (left, right):
            below *= side.counts(nodes, side.low[dim][side.box] < at[side.node])
            above *= side.counts(nodes, side.high[dim][side.box] > at[side.node])
        pairs = np.where(edges > 0, below + above, NEVER)
        better = pairs < best.pairs
        best.dim[better], best.at[better], best.pairs[better] = dim, at[better], pairs[better]
    return best


def _leaf_pairs(left: _Side, right: _Side, leaf: Mask, node_low: IntArray) -> Iterator[Pairs]:
    """Try every pair of the boxes in each leaf."""
    mine = np.flatnonzero(leaf[left.node])
    theirs = np.flatnonzero(leaf[right.node])
    theirs = theirs[np.argsort(right.node[theirs], kind="stable")]
    sorted_nodes = right.node[theirs]
    starts = np.searchsorted(sorted_nodes, left.node[mine], "left")
    stops = np.searchsorted(sorted_nodes, left.node[mine], "right")
    for row, run in _runs(starts, stops):
        entry = mine[row]
        i, j, node = left.box[entry], right.box[theirs[run]], left.node[entry]
        for dim in range(node_low.shape[1]):
            begin = np.maximum(left.low[dim][i], right.low[dim][j])
            end = np.minimum(left.high[dim][i], right.high[dim][j])
            # The corner where the intersection begins lies in exactly one node, which reports the pair.
            meets = np.flatnonzero((begin < end) & (begin >= node_low[node, dim]))
            i, j, node = i[meets], j[meets], node[meets]
        yield i, j


def _halve(
    left: _Side, right: _Side, cut: _Cut, go: Mask, low: IntArray, high: IntArray, vain: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Cut the nodes that go on in two; give each entry to the halves it reaches into. The new nodes are returned."""
    dim, at, low, high = cut.dim[go], cut.at[go], low[go], high[go]
    for side in (left, right):
        side.move(go)
        where = dim[side.node]
        down = np.flatnonzero(side.low[where, side.box] < at[side.node])
        up = np.flatnonzero(side.high[where, side.box] > at[side.node])
        side.keep(np.concatenate([down, up]), np.concatenate([2 * side.node[down], 2 * side.node[up] + 1]))
    rows = np.arange(len(dim))
    low, high, vain = np.repeat(low, 2, axis=0), np.repeat(high, 2, axis=0), np.repeat(vain[go], 2)
    high[2 * rows, dim] = at
    low[2 * rows + 1, dim] = at
    # A node that lacks boxes of one side can have no pair.
    alive = (left.counts(len(low)) > 0) & (right.counts(len(low)) > 0)
    for side in (left, right):
        side.move(alive)
    return low[alive], high[alive], vain[alive]
