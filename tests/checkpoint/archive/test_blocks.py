"""Blocks, keys and layouts as files have them: each element once, and what is read is what was written."""

from __future__ import annotations

import json
import math
from itertools import chain

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.layout.grids import layouts, spelled

from shardwise.checkpoint.archive.blocks import _blocks
from shardwise.checkpoint.archive.index_file import box_key
from shardwise.checkpoint.archive.layout_json import PlacesWriter, layout_from_json, layout_to_json, places_from_json
from shardwise.checkpoint.archive.tensor_file import CHECKSUMS, METADATA
from shardwise.comm.transfer.views import cut
from shardwise.errors import CheckpointError
from shardwise.layout import Layout

SIZES = st.lists(st.integers(1, 7), max_size=4).map(tuple)


def numbers_in(size: tuple[int, ...], offsets: list[int], sizes: list[int]) -> list[int]:
    """The elements of a box, in order, by their numbers in the array."""
    numbers = np.arange(math.prod(size)).reshape(size)
    found: list[int] = numbers[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].reshape(-1).tolist()
    return found


@given(SIZES, st.integers(1, 40), st.integers(1, 90))
def test_blocks_are_stretches_and_boxes(size: tuple[int, ...], most: int, part: int) -> None:
    """In order, each within the limit, as the transfer planner cuts; parts are whole blocks."""
    blocks = _blocks(size, most)
    boxes = [blocks.box(number) for number in range(blocks.count)]
    assert boxes == list(cut(([0] * len(size), list(size)), most))
    elements = [numbers_in(size, *box) for box in boxes]
    assert list(chain.from_iterable(elements)) == list(range(math.prod(size)))
    assert [2 * len(each) for each in elements] == blocks.nbytes(2)
    assert max(map(len, elements)) <= most
    parts = [numbers_in(size, *box) for box in blocks.parts(part)]
    assert list(chain.from_iterable(parts)) == list(range(math.prod(size)))
    assert {each[0] for each in parts} <= {each[0] for each in elements}
    assert max(map(len, parts)) <= max(part, most)


@given(SIZES, st.integers(1, 40), st.data())
def test_the_blocks_that_a_box_meets(size: tuple[int, ...], most: int, data: st.DataObject) -> None:
    """Those that have an element in common with it, and no others, each once."""
    blocks = _blocks(size, most)
    offsets = [data.draw(st.integers(0, dim - 1)) for dim in size]
    sizes = [data.draw(st.integers(1, dim - offset)) for dim, offset in zip(size, offsets, strict=True)]
    wanted = set(numbers_in(size, offsets, sizes))
    met = list(blocks.meeting(offsets, sizes))
    assert [(first, lengths) for _, first, lengths in met] == [blocks.box(number) for number, _, _ in met]
    expected = [k for k in range(blocks.count) if wanted & set(numbers_in(size, *blocks.box(k)))]
    assert sorted(number for number, _, _ in met) == expected
    assert blocks.elements_meeting(offsets, sizes) == sum(math.prod(lengths) for _, _, lengths in met)


def test_an_array_without_elements_has_no_blocks() -> None:
    """Whatever its other sizes are."""
    for size in ((0,), (3, 0), (0, 4, 5)):
        assert _blocks(size, 8).count == 0
        assert _blocks(size, 8).nbytes(4) == []


NAMES = st.one_of(
    st.text(max_size=4), st.sampled_from(["w", "w[0:1]", "w[0:1, 0:2]", "[]", METADATA, CHECKSUMS, "w[", "]"])
)


@st.composite
def boxed(draw: st.DrawFn) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """A tensor and a box of it."""
    size = draw(st.lists(st.integers(1, 3), max_size=2).map(tuple))
    offsets = tuple(draw(st.integers(0, dim - 1)) for dim in size)
    sizes = tuple(draw(st.integers(1, dim - offset)) for dim, offset in zip(size, offsets, strict=True))
    return draw(NAMES), size, offsets, sizes


@given(st.lists(boxed(), max_size=8))
def test_no_two_boxes_have_the_same_key(
    found: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]],
) -> None:
    """Of any tensors of one state, whatever they are called; nor the keys that the format keeps for itself."""
    by_name = {name: size for name, size, _, _ in found}
    different = {one for one in found if by_name[one[0]] == one[1]}
    keys = [box_key(*one) for one in different]
    assert len(set(keys)) == len(keys)
    assert not {METADATA, CHECKSUMS} & set(keys)


@given(layouts(), st.booleans())
def test_layouts_come_back_from_words(layout: Layout, listed: bool) -> None:
    """By their rule or box by box: the same boxes in the same files; those with replicas are refused."""
    layout = layout if listed else layout.once
    layout = spelled(layout) if listed else layout
    writer = PlacesWriter()
    words = json.loads(json.dumps({"entry": layout_to_json(layout, writer), "places": writer.words}))
    places = places_from_json(words["places"], 1 + int(layout.ranks.max(initial=0)))
    try:
        found = layout_from_json("w", torch.Size(layout.size), words["entry"], places)
    except CheckpointError:
        assert layout.has_replicas
        return
    assert not layout.has_replicas or not torch.Size(layout.size).numel()
    filled = layout.pattern.filled
    assert np.array_equal(found.pattern.filled, filled)
    for mine, theirs in (
        (found.at(filled).offsets, layout.at(filled).offsets),
        (found.at(filled).sizes, layout.at(filled).sizes),
    ):
        assert np.array_equal(mine, theirs)
    assert np.array_equal(found.ranks, layout.ranks)
