"""Which keys a query sees, and the blocks that queries and keys fall into: against a table of all pairs."""

from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.ops.attention import visibility
from shardwise.ops.attention.visibility import TRIANGLE, Span, Visibility, VisibleBlock


def pairs(rule: Visibility, length: int) -> np.ndarray:
    """True where the query of a row sees the key of a column."""
    place = np.arange(length)
    distance = place[None, :] - place[:, None]
    document = np.searchsorted(np.array(rule.documents or (0,)), place, side="right")
    seen: np.ndarray = document[:, None] == document[None, :]
    if rule.before is not None:
        seen &= distance >= -rule.before
    if rule.behind is not None:
        seen &= distance <= rule.behind
    return seen


def painted(blocks: list[VisibleBlock], length: int) -> np.ndarray:
    """How many blocks have each pair of a query and a key that it sees."""
    count = np.zeros((length, length), dtype=int)
    for (first, last), (begin, end), (low, high) in blocks:
        distance = np.arange(end - begin)[None, :] - np.arange(last - first)[:, None]
        seen = np.ones_like(distance, dtype=bool)
        if low is not None:
            seen &= distance >= low
        if high is not None:
            seen &= distance <= high
        count[first:last, begin:end] += seen
    return count


@st.composite
def cases(draw: st.DrawFn) -> tuple[Visibility, int, Span, Span]:
    """A rule, a length, and some queries and keys."""
    length = draw(st.integers(2, 24))
    begins = draw(st.none() | st.sets(st.integers(1, length - 1), max_size=4))
    documents = None if begins is None else (0, *sorted(begins))
    far = st.none() | st.integers(0, 9)
    ends = st.integers(0, length)
    spans = st.tuples(ends, ends).map(lambda two: (min(two), max(two)))
    return Visibility(draw(far), draw(st.sampled_from([None, 0, 0, 2])), documents), length, draw(spans), draw(spans)


@settings(max_examples=400, deadline=None)
@given(cases())
def test_blocks_have_each_pair_once(case: tuple[Visibility, int, Span, Span]) -> None:
    """All pairs of these queries and keys that the rule allows, none else, none twice; triangles are squares."""
    rule, length, queries, keys = case
    with mock.patch.object(visibility, "TILE", 4):
        blocks = list(rule.blocks(queries, keys, length))
    expected = np.zeros((length, length), dtype=int)
    expected[slice(*queries), slice(*keys)] = pairs(rule, length)[slice(*queries), slice(*keys)]
    np.testing.assert_array_equal(painted(blocks, length), expected)
    for block in blocks:
        assert block.band != TRIANGLE or block.queries[1] - block.queries[0] == block.keys[1] - block.keys[0]


@settings(max_examples=400, deadline=None)
@given(cases())
def test_keys_that_are_seen(case: tuple[Visibility, int, Span, Span]) -> None:
    """The keys that come to a rank are those that one of its queries sees."""
    rule, length, queries, _ = case
    found = np.zeros(length, dtype=bool)
    for begin, end in rule.spans_seen(queries, length):
        assert begin < end
        assert not found[begin:end].any()
        found[begin:end] = True
    np.testing.assert_array_equal(found, pairs(rule, length)[slice(*queries)].any(axis=0))


def test_causal_pieces_that_begin_together_are_one_triangle() -> None:
    """The kernels' own causal mask serves the diagonal, and nothing else is computed there."""
    causal = Visibility(behind=0)
    assert list(causal.blocks((8, 16), (8, 16), 32)) == [VisibleBlock((8, 16), (8, 16), TRIANGLE)]
    assert list(causal.blocks((8, 16), (16, 24), 32)) == []
    assert list(causal.blocks((16, 24), (0, 16), 32)) == [VisibleBlock((16, 24), (0, 16))]


def test_masks_of_a_window_are_small() -> None:
    """Only the edges of a window take masks, of at most a tile's square, however long the sequence is."""
    window = Visibility(before=4095, behind=0)
    blocks = list(window.blocks((65536, 65536 + 8192), (0, 65536 + 8192), 1 << 17))
    masked = [block for block in blocks if block.band not in (visibility.ALL, TRIANGLE)]
    assert masked
    for (first, last), (begin, end), _ in masked:
        assert (last - first) * (end - begin) <= visibility.TILE**2
