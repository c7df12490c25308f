"""Pictures of layouts, transfers and modules."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from docs.pictures import make
from tests.cases import ALL, SIZE, boxes, chunks, places
from torch import nn

import shardwise
from shardwise import GridShardingSpec, Layout, ReplicatedShardingSpec, ShardingPlan, draw, make_plan
from shardwise.errors import PropertyError, SignatureError
from shardwise.layout.geometry import describe
from shardwise.layout.pictures import Picture
from shardwise.layout.pictures.colours import channels, colour, contrast, ink_on
from shardwise.layout.pictures.svg import text_width
from shardwise.layout.pictures.transfer_picture import traffic_table
from shardwise.layout.pictures.words import bytes_text, count_text, lengths_text, ranks_text
from shardwise.testing import ranks

WORLD = range(64)


def marks(svg: str, kind: str) -> list[tuple[str, ET.Element]]:
    """The tooltips of all marks of a kind, with the marks."""
    found = [mark for mark in ET.fromstring(svg).findall(".//{*}g") if mark.get("class") == f"mark {kind}"]
    return [(mark[0].text or "", mark) for mark in found]


def texts(node: ET.Element, x: float = 0, y: float = 0) -> Iterator[tuple[float, float, ET.Element]]:
    """Every text below a node, with where its own zero lies."""
    moved = re.fullmatch(r"translate\((\S+) (\S+)\)", node.get("transform", ""))
    if moved:
        x, y = x + float(moved[1]), y + float(moved[2])
    if node.tag.endswith("}text"):
        yield x, y, node
    for child in node:
        yield from texts(child, x, y)


def assert_readable(picture: Picture) -> None:
    """All text lies within the drawing; text on a box has contrast; it is for light and dark; the page is XML."""
    svg = ET.fromstring(picture.svg())
    _, _, width, height = map(float, svg.get("viewBox", "").split())
    for left, top, text in texts(svg):
        size, x, y = (float(text.get(name, "")) for name in ("font-size", "x", "y"))
        begin = left + x - text_width(text.text or "", size) * {"middle": 0.5, "end": 1}.get(text.get("text-anchor"), 0)
        assert begin >= 0, text.text
        assert begin + text_width(text.text or "", size) <= width, text.text
        assert size * 0.7 <= top + y <= height, text.text
    for _, mark in marks(picture.svg(), "shard"):
        fill = mark[1].get("fill")
        inks = [str(text.get("style")).removeprefix("fill:") for text in mark.findall(".//{*}text")]
        assert not fill or all(contrast(fill, ink) >= 4.5 for ink in inks)
    assert "prefers-color-scheme:dark" in picture.svg()
    assert ET.fromstring(picture.html()).get("class") == "shardwise"


def test_the_terminal_picture() -> None:
    """Boxes, ranks, devices, bytes and shares."""
    spec = GridShardingSpec((0, 1), [places(0, 1), places(2, 3)], [(6, 2), None])
    assert draw(spec, (8, 4), dtype=torch.float32).text(width=46).splitlines() == [
        "8x4 float32, 128 B in 4 shards",
        "  dim 0 ↓  dim 1 →",
        "  ┌───────────────────┬───────────────────┐",
        "  │                   │                   │",
        "  │      rank 0       │      rank 1       │",
        "  │                   │                   │",
        "  ├───────────────────┼───────────────────┤",
        "  │      rank 2       │      rank 3       │",
        "  └───────────────────┴───────────────────┘",
        "  rank:0/cpu    1 shard                 48 B   38% ████████",
        "  rank:1/cpu    1 shard                 48 B   38% ████████",
        "  rank:2/cpu    1 shard                 16 B   12% ██",
        "  rank:3/cpu    1 shard                 16 B   12% ██",
    ]
    assert str(draw(spec, (8, 4))).startswith("8x4, 32 elements in 4 shards")


@pytest.mark.parametrize("name", ALL)
def test_every_layout_can_be_drawn(name: str) -> None:
    """As text, with and without colours, and as SVG with each shard once, in its rank's colour, with its tooltip."""
    layout = ALL[name].layout(SIZE)
    picture = draw(layout, dtype=torch.int16, width=360)
    plain, coloured = str(picture), picture.text(colours=True)
    assert "\x1b" not in plain
    assert "\x1b" in coloured
    labels = re.findall(r"[│ ]rank \d+ ", plain)
    assert len(labels) == len(layout.boxes.filled)
    found = {told: mark[1].get("fill") for told, mark in marks(picture.svg(), "shard")}
    assert len(marks(picture.svg(), "shard")) == len(layout)
    for row, volume in enumerate(layout.boxes.volumes.tolist()):
        box = describe(layout.boxes.offsets[row], layout.boxes.sizes[row])
        (told,) = (told for told in found if told.startswith(f"{layout.place(row)} holds {box}: "))
        assert f", {2 * volume} B" in told
        assert found[told] == (colour(int(layout.ranks[row])) if volume else None)
    assert_readable(picture)
    assert float(ET.fromstring(picture.svg()).get("width", "")) <= 360
    assert layout._repr_html_() == draw(layout).html()


def test_dims_become_slices_and_replicas_copies() -> None:
    """One panel for each part in the dims that are not drawn and for each copy; of many copies, a few."""
    grid = [[places(0, 1), places(2, 3)], [places(4, 5), places(6, 7)]]
    cube = draw(GridShardingSpec((0, 1, 2), grid), (4, 4, 4))
    for shown in (str(cube), cube.svg()):
        assert "dim 2: 0:2" in shown
        assert "dim 2: 2:4" in shown
    assert len(marks(cube.svg(), "shard")) == 8
    assert_readable(cube)
    twice = Layout.of(
        (4, 4), chunks(0, 0, 1, 2, 3).layout((4, 4)).boxes.take(np.array([0, 1, 2, 3] * 2)), places(*range(8))
    )
    mesh = draw(twice)
    assert len(marks(mesh.svg(), "shard")) == 8
    assert "copy 1 of 2: ranks 0–3" in mesh.svg()
    assert "copy 2 of 2: ranks 4–7" in mesh.svg()
    copies = draw(ReplicatedShardingSpec(places(*WORLD)), (4, 4))
    for shown in (str(copies), copies.svg()):
        assert "copy 1 of 64: rank 0" in shown
        assert "and 61 more copies, on ranks 3–63" in shown
    assert_readable(copies)


def test_many_ranks_are_summed_up() -> None:
    """Equal ranks share a line, boxes between the first and the last are left out, and nothing grows with the world."""
    rows = draw(chunks(0, *WORLD), (4001, 8), dtype=torch.float32)
    assert [told for told, _ in marks(rows.svg(), "holding")] == [
        "ranks 0–62 (rank:0/cpu …), each: 1 shard, 2.0 KiB, 1.6% of the tensor",
        "rank:63/cpu: 1 shard, 1.0 KiB, 0.8% of the tensor",
    ]
    assert "ranks 0–62  " in str(rows)
    (rest,) = (told for told, _ in marks(rows.svg(), "rest"))
    shown = len(marks(rows.svg(), "shard"))
    assert rest.startswith(f"{64 - shown} boxes of ranks ")
    assert "4001 = 63 × 63 + 32" in rows.svg().replace("\xa0", " ")
    thousand = draw(GridShardingSpec((0, 1), [places(*range(32 * k, 32 * k + 32)) for k in range(32)]), (64, 64))
    bricks = [([2 * k, 0], [2, 1], k) for k in range(1500)] + [([2 * k + 1, 1], [2, 1], k) for k in range(1499)]
    irregular = draw(boxes(*bricks, ([0, 1], [1, 1], 0), ([2999, 1], [1, 1], 1)), (3000, 2))
    for picture in (rows, thousand, irregular):
        assert_readable(picture)
    assert len(thousand.svg()) < 64 * 2**10
    assert len(irregular.svg()) < 2**20
    assert len(marks(irregular.svg(), "shard")) == 2048
    assert "and 953 smaller boxes" in irregular.svg()
    for picture in (rows, thousand):
        assert max(map(len, str(picture).splitlines())) <= 80
    assert "… ranks 11–58" in str(rows)
    assert "too many edges to draw" in str(irregular)


def test_odd_layouts_are_drawn_too() -> None:
    """No elements, no dims, a place without a rank, a length of one beside millions."""
    assert "no elements" in str(draw(chunks(0, 0, 1), (0,)))
    assert len(marks(draw(chunks(0, 0, 1), (0,)).svg(), "shard")) == 2
    assert "scalar" in str(draw(boxes(([], [], 0)), ()))
    worker = Layout.of((2, 2), boxes(([0, 0], [2, 2], 0)).layout((2, 2)).boxes, ["worker0/cpu"])
    assert "worker0/cpu" in draw(worker).svg()
    thin = draw(boxes(([0, 0], [1, 9], 0), ([1, 0], [10**7, 9], 1)), (10**7 + 1, 9))
    assert float(marks(thin.svg(), "shard")[0][1][1].get("height", "")) > 12
    for picture in (draw(boxes(([], [], 0)), ()), draw(worker), thin):
        assert_readable(picture)


def test_colours_stay_apart() -> None:
    """Any two of 64 ranks differ by more than eyes need, neighbours by much more, and ink is readable on all."""
    known = [colour(rank) for rank in range(2048)]
    assert min(contrast(one, ink_on(one)) for one in known) >= 4.5
    points = np.array([_oklab(one) for one in known[:64]])
    apart = np.sqrt(((points[:, None] - points[None]) ** 2).sum(-1)) + np.eye(64)
    assert apart.min() > 0.03
    assert apart[:8, :8].min() > 0.12
    assert len(set(known[:512])) > 500


def _oklab(one: str) -> list[float]:
    """A colour in the space where equal distances look equal; a just visible difference is about 0.02."""
    linear = np.array([((c / 255 + 0.055) / 1.055) ** 2.4 if c > 10 else c / 255 / 12.92 for c in channels(one)])
    cones = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566]]
    cones.append([0.0883024619, 0.2817188376, 0.6299787005])
    axes = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099]]
    axes.append([0.0259040371, 0.7827717662, -0.8086757660])
    return list(np.array(axes) @ np.cbrt(np.array(cones) @ linear))


def test_a_plan_shows_before_after_and_who_sends_what() -> None:
    """In the terminal with what stays in brackets; in the drawing with each pair once, of many ranks sums of them."""
    plan = make_plan(chunks(0, 0, 1).layout((4, 4)), chunks(1, 0, 1).layout((4, 4)))
    lines = str(draw(plan, dtype=torch.float32)).splitlines()
    assert lines[0] == "before: 4x4 float32, 64 B in 2 shards"
    middle = lines.index("32 B move from 2 ranks to 2, 50% of the tensor; no transfer could move less")
    assert lines[middle + 1 : middle + 4] == [
        "            to 0    to 1",
        "  from 0  [16 B]    16 B",
        "  from 1    16 B  [16 B]",
    ]
    assert "after: 4x4 float32, 64 B in 2 shards" in lines
    picture = draw(plan, dtype=torch.float32)
    assert [told for told, _ in marks(picture.svg(), "move")] == ["rank 0 → rank 1: 16 B", "rank 1 → rank 0: 16 B"]
    assert [told for told, _ in marks(picture.svg(), "stays")] == ["16 B stay on rank 0", "16 B stay on rank 1"]
    assert len(marks(picture.svg(), "shard")) == 4
    assert plan._repr_html_() == draw(plan).html()
    many = make_plan(chunks(0, *WORLD).layout((128, 128)), chunks(1, *WORLD).layout((128, 128)))
    told = [told for told, _ in marks(draw(many).svg(), "move")]
    assert sum(int(re.findall(r": ([\d,]+) elements", one)[0].replace(",", "")) for one in told) == many.moved
    for one in (picture, draw(many, width=360), draw(plan.reverse())):
        assert_readable(one)


def test_tables_of_traffic_add_up_to_the_plan() -> None:
    """Between all pairs of layouts, in full and shortened, there and back."""
    world = range(12)
    wide = [chunks(0, *world), chunks(1, *reversed(world)), ReplicatedShardingSpec(places(*world))]
    pairs = [(SIZE, *pair) for pair in product(ALL.values(), repeat=2)] + [
        ((96, 80), *pair) for pair in product(wide, repeat=2)
    ]
    for size, before, after in pairs:
        plan = make_plan(before.layout(size), after.layout(size))
        for there, most in product((plan, plan.reverse()), (6, 64)):
            traffic = traffic_table([(there, 1)], most)
            assert int(traffic.moves.sum()) == there.moved
            for sender, sent in zip(traffic.senders, traffic.sent, strict=True):
                assert sent == sum(there.sent(rank) for rank in sender.ranks)
            for receiver, received in zip(traffic.receivers, traffic.received, strict=True):
                assert received == sum(there.received(rank) for rank in receiver.ranks)


class Small(nn.Module):
    """Layers that are alike, a tied weight, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.words, self.head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("steps", torch.zeros(400, dtype=torch.int64))


@ranks(4)
def test_a_module_shows_what_each_rank_holds() -> None:
    """Bytes of the local tensors on this rank and on the other; layers that are alike are one entry."""
    plan = {"words.weight": chunks(0, 0, 1), "layers.*.weight": boxes(([0, 0], [2, 6], 0), ([2, 0], [4, 6], 1))}
    model = shardwise.shard_module(Small(), ShardingPlan(plan))
    picture = draw(model)
    plain = 3 * 6 * 4 + 400 * 8
    sharded = [p for p in model.parameters() if isinstance(p, shardwise.ShardedTensor)]
    here = sum(shard.tensor.numel() * 4 for p in sharded for shard in p.local_shards())
    rank, held = torch.distributed.get_rank(), [3 * 48 + 120, 3 * 96 + 120, 0, 0]
    assert held[rank] == here
    for rank, bytes_ in enumerate(held[:2]):
        told = f"rank {rank}: {bytes_text(bytes_)} of shards, {bytes_text(plain)} of plain tensors"
        assert told in [one for one, _ in marks(picture.svg(), "holding")]
    told = [one for one, _ in marks(picture.svg(), "tensor")]
    assert "layers.*.weight: 3 tensors of 6 × 6 float32, 432 B, dim 0 in 2" in told
    assert "words.weight: 10 × 6 float32, 240 B, dim 0 in 2" in told
    assert len(told) == 4
    assert "4 of 8 tensors sharded" in str(picture)
    model.old = shardwise.zeros(chunks(0, 0, 1), 4, 4)  # an attribute, as the old system keeps them
    assert "5 of 9 tensors sharded" in str(draw(model))
    model.steps.device_mesh = None  # as a DTensor has
    with pytest.raises(PropertyError, match="'steps' is a Tensor: convert it with from_dtensor"):
        draw(model)
    assert_readable(picture)
    tensor = model.words.weight
    assert len(marks(draw(tensor).svg(), "shard")) == 2
    assert draw(tensor).svg().count('class="here"') == len(tensor.local_shards())
    assert str(draw(tensor)).startswith("10x6 float32, 240 B in 2 shards")


@ranks(4)
def test_the_documentation_shows_what_is_drawn() -> None:
    """Its pictures are those that ``make pictures`` draws now."""
    folder = Path(make.__file__).parent
    drawn = {name: picture.svg() for name, picture in make.pictures().items()} | {"model.svg": make.model().svg()}
    assert {file.name for file in folder.glob("*.svg")} == set(drawn)
    for name, svg in drawn.items():
        assert (folder / name).read_text(encoding="utf-8") == svg + "\n", f"{name} is not up to date: make pictures"


@ranks(2)
def test_a_sharding_plan_is_drawn_as_it_would_cut_a_module() -> None:
    """By one rank alone, without changing the module; the picture is that of the module that is then sharded."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    for plan in (
        {"0.*": 0, "2.weight": 1},
        ShardingPlan({"2.weight": chunks(0, 1, 0)}),
        shardwise.plans.rows(model),
        shardwise.plans.FullyShard(weights=[3, 1]),
    ):
        drawn = draw(plan, model) if dist.get_rank() == 1 else None
        assert all(type(one) is nn.Parameter for one in model.parameters())
        made = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
        shardwise.shard_module(made, plan)
        if drawn is not None:
            assert (drawn.text(), drawn.svg()) == (draw(made).text(), draw(made).svg())
    with pytest.raises(SignatureError, match="is a sharding plan for a module: say which"):
        draw(shardwise.plans.rows(model))
    with pytest.raises(SignatureError, match="found a ChunkShardingSpec"):
        draw(chunks(0, 0, 1), model)


def test_names_use_the_room_that_a_picture_has() -> None:
    """A long name is whole where it fits, and short in a narrow picture."""
    name = "a_module_with_a_very_long_name_indeed"
    model = nn.ModuleDict({name: nn.ModuleDict({name: nn.Linear(2, 2)})})
    wide, narrow = draw(model), draw(model, width=300)
    assert f">{name}.{name}.weight</text>" in wide.svg()
    assert f">{name}.{name}.weight</text>" not in narrow.svg()
    for picture in (wide, narrow):
        assert_readable(picture)


def test_drawing_and_saving(tmp_path: Path) -> None:
    """By the kind of file; what cannot be drawn says what can be."""
    picture = draw(chunks(0, 0, 1), (4, 4))
    for kind, first in ((".svg", "<svg"), (".html", "<!doctype html>"), (".txt", "4x4, 16 elements")):
        picture.save(tmp_path / f"picture{kind}")
        assert (tmp_path / f"picture{kind}").read_text(encoding="utf-8").startswith(first)
    assert repr(picture) == "<Picture of Layout 4 × 4>"
    assert picture._repr_svg_() == picture.svg()
    assert picture._repr_html_() == picture.html()
    with pytest.raises(PropertyError, match=r"\.svg, \.html, \.txt"):
        picture.save(tmp_path / "picture.png")
    with pytest.raises(SignatureError, match="say which to draw"):
        draw(chunks(0, 0, 1))
    with pytest.raises(SignatureError, match="found a Tensor"):
        draw(torch.zeros(2))


def test_words() -> None:
    """Bytes, counts, ranks and lengths as one says them."""
    assert [bytes_text(n) for n in (0, 1023, 1536, 2**20, 3 * 2**30, 2**41)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.0 MiB",
        "3.0 GiB",
        "2.0 TiB",
    ]
    assert [count_text(n) for n in (7, 99_999, 123_456, 10**9)] == ["7", "99,999", "123.5 k", "1.0 G"]
    assert [ranks_text(some) for some in ([3], [0, 1], [5, 0, 1, 2], range(0, 20, 2))] == [
        "rank 3",
        "ranks 0, 1",
        "ranks 0–2, 5",
        "10 ranks: 0, 2, 4 … 18",
    ]
    assert [lengths_text(some) for some in ([4], [3, 3, 1], range(1, 9))] == ["4", "2 × 3 + 1", "8 parts of 1 to 8"]
