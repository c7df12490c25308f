"""Boxes as text."""

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
