"""Pictures of layouts."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
import torch
from tests.cases import SIZE, SPECS, boxes, chunks, places

from shardwise import GridShardingSpec, make_plan
from shardwise.viz import layout_html, layout_svg, layout_text, plan_text
from shardwise.viz.figures import bytes_text


def test_the_terminal_picture() -> None:
    """Boxes, ranks, devices, bytes and shares."""
    text = layout_text(GridShardingSpec((0, 1), [places(0, 1), places(2, 3)], [(6, 2), None]).layout((8, 4)), width=46)
    assert text.splitlines() == [
        "8x4 float32, 128 B in 4 shards",
        "  dim 0 ↓  dim 1 →",
        "  ┌───────────────────┬───────────────────┐",
        "  │      rank 0       │      rank 1       │",
        "  ├───────────────────┼───────────────────┤",
        "  │      rank 2       │      rank 3       │",
        "  └───────────────────┴───────────────────┘",
        "  rank:0/cpu    1 shard                 48 B   38% ████████",
        "  rank:1/cpu    1 shard                 48 B   38% ████████",
        "  rank:2/cpu    1 shard                 16 B   12% ██",
        "  rank:3/cpu    1 shard                 16 B   12% ██",
    ]


@pytest.mark.parametrize("name", SPECS)
def test_every_layout_can_be_drawn(name: str) -> None:
    """As text with and without colours, as SVG that is well-formed, with a box for each filled shard."""
    layout = SPECS[name].layout(SIZE)
    plain, coloured = layout_text(layout), layout_text(layout, colours=True, dtype=torch.int8)
    assert "\x1b" not in plain
    assert "\x1b" in coloured
    filled = len(layout.boxes.filled)
    assert plain.count("rank ") == filled
    svg = ET.fromstring(layout_svg(layout))
    assert len(svg.findall(".//{*}rect")) == filled
    assert ET.fromstring(layout_html(layout, dtype=torch.float32).replace("<br>", "")) is not None


def test_more_than_two_dims_are_drawn_in_panels() -> None:
    """One for each part in the dims that are not drawn."""
    grid = [[places(0, 1), places(2, 3)], [places(4, 5), places(6, 7)]]
    text = layout_text(GridShardingSpec((0, 1, 2), grid).layout((4, 4, 4)))
    assert "dim 2: 0:2" in text
    assert "dim 2: 2:4" in text
    assert text.count("rank ") == 8


def test_large_and_odd_layouts_stay_readable() -> None:
    """Too many boxes to draw, none with elements, no dims."""
    assert "too many edges to draw" in layout_text(chunks(0, *range(1000)).layout((1000,)))
    assert "and 968 more places" in layout_text(chunks(0, *range(1000)).layout((1000,)))
    assert "no elements" in layout_text(chunks(0, 0, 1).layout((0,)))
    assert layout_svg(chunks(0, 0, 1).layout((0,))) == ""
    assert "scalar" in layout_text(boxes(([], [], 0)).layout(()))


def test_a_plan_shows_before_after_and_who_sends_what() -> None:
    """With what stays in brackets."""
    plan = make_plan(chunks(0, 0, 1).layout((4, 4)), chunks(1, 0, 1).layout((4, 4)))
    lines = plan_text(plan).splitlines()
    assert lines[0] == "before: 4x4 float32, 64 B in 2 shards"
    middle = lines.index("32 B move in 4 pieces; at least 32 B must")
    assert lines[middle + 1 : middle + 4] == [
        "            to 0    to 1",
        "  from 0  [16 B]    16 B",
        "  from 1    16 B  [16 B]",
    ]
    assert "after: 4x4 float32, 64 B in 2 shards" in lines


def test_bytes_as_one_says_them() -> None:
    """Up to terabytes."""
    assert [bytes_text(n) for n in (0, 1023, 1536, 2**20, 3 * 2**30, 2**41)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.0 MiB",
        "3.0 GiB",
        "2.0 TiB",
    ]
