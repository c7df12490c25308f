"""A rule says the same as its boxes spelled out, whatever is asked."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.layout.grids import grids, layouts, spelled

from shardwise.layout import Grid, Layout
from shardwise.layout.geometry import Boxes
from shardwise.layout.grid import grid_from_boxes
from shardwise.layout.listing import Listing
from shardwise.layout.specs import spec_class_of, spec_of
from shardwise.layout.specs.chunking import even_axis, sized_axis


def some_boxes(data: st.DataObject, size: tuple[int, ...]) -> Boxes:
    """Boxes inside of a tensor, some of them empty."""
    edges = [
        [sorted(data.draw(st.lists(st.integers(0, extent), min_size=2, max_size=2))) for extent in size]
        for _ in range(data.draw(st.integers(0, 3)))
    ]
    array = np.array(edges, dtype=np.int64).reshape(len(edges), len(size), 2)
    return Boxes(array[:, :, 0], array[:, :, 1] - array[:, :, 0])


@given(grids())
@settings(max_examples=400)
def test_boxes_that_are_a_grid_are_one_in_one_way(grid: Grid) -> None:
    """The boxes make up the tensor, are recognised, and become the same grid again."""
    boxes = grid.boxes
    assert len(boxes) == len(grid)
    assert grid_from_boxes(grid.size, boxes) == grid
    assert int(boxes.take(grid.once).volumes.sum()) == int(np.prod(grid.size, dtype=np.int64))


@given(grids(), st.data())
@settings(max_examples=400)
def test_a_grid_answers_as_its_boxes_do(grid: Grid, data: st.DataObject) -> None:
    """Every question that layouts ask."""
    plain = Listing(grid.size, grid.boxes)
    rows = np.array(data.draw(st.lists(st.integers(0, len(grid) - 1), max_size=5)), dtype=np.int64)
    assert grid.at(rows) == plain.at(rows)
    wanted = some_boxes(data, grid.size)
    for once in (False, True):
        for found, expected in zip(grid.meeting(wanted, once=once), plain.meeting(wanted, once=once), strict=True):
            assert found.tolist() == expected.tolist()
        assert (grid.count_meeting(wanted, once=once) >= plain.count_meeting(wanted, once=once)).all()
    assert grid.filled.tolist() == plain.filled.tolist()
    assert grid.whole.tolist() == plain.whole.tolist()
    assert grid.volumes == plain.volumes
    assert grid.all_volumes.tolist() == plain.all_volumes.tolist()
    assert grid.has_replicas == plain.has_replicas
    assert [grid.is_cut(dim) for dim in range(len(grid.size))] == [plain.is_cut(dim) for dim in range(len(grid.size))]
    filled = grid.filled  # of two empty boxes, a grid does not say that they are the same
    assert grid.first(filled).tolist() == plain.first(filled).tolist()
    first = np.unique(grid.first(filled))
    for found, expected in zip(grid.holders(first), plain.holders(first), strict=True):
        assert found.tolist() == expected.tolist()


@given(grids(), st.data())
def test_packing_leaves_out_what_is_empty(grid: Grid, data: st.DataObject) -> None:
    """In the dims that are named, and in no other."""
    dims = data.draw(st.sets(st.sampled_from(range(len(grid.size))))) if grid.size else set()
    packed, rows = grid.packed(dims)
    cut = [dim for dim in dims if dim in grid.cuts]
    assert rows.tolist() == np.flatnonzero((grid.boxes.sizes[:, cut] > 0).all(axis=1)).tolist()
    assert packed.boxes == grid.boxes.take(rows)


@given(layouts(), st.data())
@settings(max_examples=200)
def test_a_layout_equals_its_spelled_out_twin(layout: Layout, data: st.DataObject) -> None:
    """Also in its digest and hash; and not one that differs in a box or a place."""
    twin = Layout.of(layout.size, layout.boxes, list(layout.places))
    assert twin == layout
    assert hash(twin) == hash(layout)
    assert twin.digest == layout.digest
    order = data.draw(st.permutations(range(len(layout))))
    other = layout.chosen(np.array(order))
    same = other.boxes == layout.boxes and list(other.places) == list(layout.places)
    assert (other == layout) is same
    rows = layout.order_of(other)
    assert rows is not None
    assert other.boxes.take(np.array(rows)) == layout.boxes
    assert [other.place(row) for row in rows] == list(layout.places)


@given(layouts())
@settings(max_examples=200)
def test_a_layout_answers_as_its_spelled_out_twin(layout: Layout) -> None:
    """What is on a rank, how much, and the first replicas of all."""
    plain = spelled(layout)
    for rank in range(7):
        assert layout.rows_on(rank) == tuple(np.flatnonzero(layout.ranks == rank).tolist())
    assert layout.elements_by_rank() == plain.elements_by_rank()
    assert layout.most_elements == max(layout.elements_by_rank().values())
    assert layout.in_rank_order.boxes == plain.in_rank_order.boxes
    wider = layout.with_dim(layout.ndim, 3)
    assert wider.boxes == plain.with_dim(layout.ndim, 3).boxes
    assert layout.with_dim(0, 2).boxes == plain.with_dim(0, 2).boxes
    assert layout.is_whole_everywhere == bool((layout.boxes.sizes == np.array(layout.size)).all())


@given(layouts())
@settings(max_examples=200)
def test_the_spec_of_a_layout_makes_it(layout: Layout) -> None:
    """And is of the class that was said."""
    spec = spec_of(layout)
    assert type(spec) is spec_class_of(layout)
    assert spec.layout(layout.size) == layout


@given(layouts(), st.data())
@settings(max_examples=200)
def test_slices_and_mirrors_follow_the_rule(layout: Layout, data: st.DataObject) -> None:
    """As each box, cut or turned by itself."""
    grid = layout.pattern
    assert isinstance(grid, Grid)
    if not layout.ndim:
        return
    dim = data.draw(st.integers(0, layout.ndim - 1))
    start, stop = sorted(data.draw(st.lists(st.integers(0, layout.size[dim]), min_size=2, max_size=2)))
    step = data.draw(st.integers(1, 3))
    made, rows = grid.sliced(dim, start, stop, step)
    marked = np.zeros(layout.size[dim], dtype=np.int64)
    marked[start:stop:step] = 1
    before = np.concatenate([[0], np.cumsum(marked)])  # how many are taken before each element
    boxes = layout.at(rows)
    expected = boxes.offsets.copy(), boxes.sizes.copy()
    expected[0][:, dim] = before[boxes.offsets[:, dim]]
    expected[1][:, dim] = before[boxes.ends[:, dim]] - before[boxes.offsets[:, dim]]
    assert made.boxes == Boxes(*expected)
    left = set(range(len(layout))) - set(rows.tolist())
    gone = layout.at(sorted(left))
    assert (before[gone.ends[:, dim]] == before[gone.offsets[:, dim]]).all()
    turned = grid.mirrored([dim])
    offsets = layout.boxes.offsets.copy()
    offsets[:, dim] = layout.size[dim] - layout.boxes.ends[:, dim]
    assert turned.boxes == Boxes(offsets, layout.boxes.sizes)
    assert grid_from_boxes(turned.size, turned.boxes) == turned


def test_edges_beyond_64_bits_are_listed() -> None:
    """A dim so long that its size times the number of places is no 64-bit number."""
    size = 2**62
    for axis in (even_axis(0, size, 8), sized_axis(0, [5, size - 5, 0, 0, 0, 0, 0, 0])):
        grid = Grid.of([size], [axis])
        assert int(grid.boxes.sizes.sum()) == size
        assert (grid.boxes.sizes >= 0).all()
        assert grid_from_boxes(grid.size, grid.boxes) == grid
        assert grid.meeting(Boxes.whole([size]))[1].tolist() == grid.boxes.filled.tolist()
