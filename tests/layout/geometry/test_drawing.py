"""Boxes as text."""

from itertools import pairwise

from shardwise.layout.geometry import Boxes, draw_boxes


def test_every_edge_is_in_its_place() -> None:
    """Lines meet as the boxes do, and each label stands in its box."""
    boxes = Boxes.parse([[0, 0], [0, 2], [2, 2]], [[4, 2], [2, 2], [2, 2]], 2)
    assert draw_boxes(boxes, ["a", "b", "c"], width=15) == [
        "┌──────┬──────┐",
        "│      │  b   │",
        "│  a   ├──────┤",
        "│      │  c   │",
        "└──────┴──────┘",
    ]


def test_one_dim_is_a_row_and_no_dim_a_single_box() -> None:
    """Small boxes still get room for their label."""
    line = Boxes.parse([[0], [1]], [[1], [99]], 1)
    assert draw_boxes(line, ["first", "second"], width=30)[1].startswith("│ first │")
    assert len(draw_boxes(Boxes.parse([[]], [[]], 0), ["it"], width=20)) == 3


def test_too_many_edges_and_empty_boxes_are_not_drawn() -> None:
    """Nothing is better than a drawing nobody can read."""
    many = Boxes.parse([[k] for k in range(200)], [[1]] * 200, 1)
    assert draw_boxes(many, [str(k) for k in range(200)]) == []
    assert draw_boxes(Boxes.parse([[0]], [[0]], 1), ["nothing"]) == []


def test_rows_are_to_scale_as_far_as_lines_allow() -> None:
    """Equal parts have a line each; of others, the larger one has more; none has less than one, nor all too many."""

    def lines(*lengths: int) -> list[int]:
        begins = [sum(lengths[:k]) for k in range(len(lengths))]
        boxes = Boxes.parse([[begin, 0] for begin in begins], [[length, 1] for length in lengths], 2)
        drawn = draw_boxes(boxes, ["x"] * len(lengths), width=9)
        edges = [k for k, line in enumerate(drawn) if line[0] in "┌├└"]
        return [after - before - 1 for before, after in pairwise(edges)]

    assert lines(7, 7, 7) == [1, 1, 1]
    assert lines(3, 2) == [3, 2]
    assert lines(6, 2, 2) == [3, 1, 1]
    assert lines(1000, 1) == [12, 1]
    assert lines(*range(1, 21)) == sorted(lines(*range(1, 21)))
    assert len(lines(*range(1, 21))) == 20
