"""`Visibility`: which keys a query sees, by their positions. Pure: intervals of positions in, blocks out.

A block is a rectangle of queries and keys. All that a query sees is in blocks without a mask, in triangles as causal
kernels compute them, or in small blocks at the edges of a window, which take a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

Span = tuple[int, int]  # positions from the first to before the second

TILE = 512  # queries in a block that takes a mask, at most: a mask has no more than its square


class Band(NamedTuple):
    """Which keys of a block a query sees: key j by query i if ``low <= j - i <= high``, counted within the block."""

    low: int | None
    high: int | None


ALL = Band(None, None)
TRIANGLE = Band(None, 0)  # up to its own place: what causal kernels compute


class VisibleBlock(NamedTuple):
    """Queries and keys by position, and which of these keys the queries see."""

    queries: Span
    keys: Span
    band: Band = ALL


@dataclass(frozen=True)
class Visibility:
    """A query sees keys from ``before`` places before to ``behind`` places behind its own; None: as many as there are.

    Causal attention is ``behind=0``. With ``documents``, the places where documents begin in the packed sequence, it
    sees none beyond the beginning and the end of its own document.
    """

    before: int | None = None
    behind: int | None = None
    documents: tuple[int, ...] | None = None

    def spans_seen(self, queries: Span, length: int) -> list[Span]:
        """The keys of a sequence of this length that at least one of these queries sees, in order."""
        found: list[Span] = []
        for part, document in self._by_document(queries, length):
            seen = self._seen(part, document)
            if seen[0] >= seen[1]:
                continue
            if found and seen[0] <= found[-1][1]:
                found[-1] = found[-1][0], max(seen[1], found[-1][1])
            else:
                found.append(seen)
        return found

    def blocks(self, queries: Span, keys: Span, length: int) -> Iterator[VisibleBlock]:
        """The blocks into which these queries and keys fall; none of keys that no query sees."""
        for part, document in self._by_document(queries, length):
            seen = _meet(self._seen(part, document), keys)
            if seen[0] < seen[1]:
                yield from self._banded(part, seen)

    def _by_document(self, queries: Span, length: int) -> Iterator[tuple[Span, Span]]:
        """The queries of each document, and the keys of the document, of which there may be fewer."""
        if queries[0] >= queries[1]:
            return
        if self.documents is None:
            yield queries, (0, length)
            return
        begins = np.array(self.documents, dtype=np.int64)
        first = max(int(np.searchsorted(begins, queries[0], side="right")) - 1, 0)
        last = int(np.searchsorted(begins, queries[1], side="left"))
        for k in range(first, last):
            begin, end = self.documents[k], max(length, queries[1])
            if k + 1 < len(self.documents):
                end = self.documents[k + 1]
            part = _meet(queries, (begin, end))
            if part[0] < part[1]:
                yield part, (min(begin, length), min(end, length))

    def _seen(self, queries: Span, document: Span) -> Span:
        begin = document[0] if self.before is None else max(queries[0] - self.before, document[0])
        end = document[1] if self.behind is None else min(queries[1] + self.behind, document[1])
        return begin, end

    def _banded(self, queries: Span, keys: Span) -> Iterator[VisibleBlock]:
        """The blocks of queries and keys of one document."""
        if self._sees_all(queries, keys):
            yield VisibleBlock(queries, keys)
        elif self.before is None and self.behind == 0:
            yield from _causal(queries, keys)
        elif self.before is None and self.behind is None:
            raise AssertionError("without a window, queries see all keys")
        else:
            for begin in range(queries[0], queries[1], TILE):
                yield from self._in_window((begin, min(begin + TILE, queries[1])), keys)

    def _sees_all(self, queries: Span, keys: Span) -> bool:
        """Whether each query sees each key."""
        none_before = self.before is None or keys[0] >= queries[1] - 1 - self.before
        none_behind = self.behind is None or keys[1] - 1 <= queries[0] + self.behind
        return none_before and none_behind

    def _in_window(self, queries: Span, keys: Span) -> Iterator[VisibleBlock]:
        """A few queries: what all of them see, and the edges of the window on both sides."""
        (first, end), (begin, stop) = queries, _meet(self._seen(queries, keys), keys)
        if begin >= stop:
            return
        low = begin if self.before is None else min(max(end - 1 - self.before, begin), stop)  # seen by all from here
        high = stop if self.behind is None else min(max(first + self.behind + 1, low), stop)  # and to here
        if self.behind == 0 and low <= first < stop <= end:
            high = first  # the rest is a triangle
        for span in ((begin, low), (low, high), (high, stop)):
            if span[0] < span[1]:
                yield from self._edge(queries, span)

    def _edge(self, queries: Span, keys: Span) -> Iterator[VisibleBlock]:
        if self._sees_all(queries, keys):
            yield VisibleBlock(queries, keys)
            return
        shift = queries[0] - keys[0]  # of a query's place among the keys
        low = None if self.before is None or keys[0] >= queries[1] - 1 - self.before else shift - self.before
        high = None if self.behind is None or keys[1] - 1 <= queries[0] + self.behind else shift + self.behind
        band = Band(low, high)
        if band == TRIANGLE:
            yield from _causal(queries, keys)
        else:
            yield VisibleBlock(queries, keys, band)


def _causal(queries: Span, keys: Span) -> Iterator[VisibleBlock]:
    """Each query sees the keys up to its own position: at most two rectangles and a square of which half is seen."""
    before = keys[0], min(queries[0], keys[1])
    if before[0] < before[1]:
        yield VisibleBlock(queries, before)
    begin, end = max(queries[0], keys[0]), min(queries[1], keys[1])
    if begin >= end:
        return
    yield VisibleBlock((begin, end), (begin, end), TRIANGLE if end - begin > 1 else ALL)
    if end < queries[1]:
        yield VisibleBlock((end, queries[1]), (begin, end))


def _meet(one: Span, other: Span) -> Span:
    return max(one[0], other[0]), min(one[1], other[1])


@lru_cache(maxsize=4096)
def blocks_of(visibility: Visibility, queries: Span, keys: Span, length: int) -> tuple[VisibleBlock, ...]:
    """The same blocks, kept."""
    return tuple(visibility.blocks(queries, keys, length))
