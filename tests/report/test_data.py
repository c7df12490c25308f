"""What the page reads: bounded in size, with its peaks kept."""

from __future__ import annotations

import html
import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from tests.report.samples import GIB, large, small, tiny

from shardwise.errors import ReportError
from shardwise.report import (
    BoxOnRank,
    Memory,
    ModuleCost,
    ModuleRow,
    ParameterRow,
    RankPart,
    Report,
    Run,
    Span,
    notebook,
    page,
    save_page,
)
from shardwise.report.boxes import MOST_BOXES, drawn_boxes, rank_ranges, traffic_blocks
from shardwise.report.data import MOST_DETAILED
from shardwise.report.page import SCRIPTS
from shardwise.report.thinning import Bar, busy_seconds, kept_points, merged_bars

MEGABYTE = 1_000_000
HOSTILE = "</script><b>'\"&<!--{{data}}\u2028"


def test_a_page_of_1024_ranks_and_700_parameters_is_small() -> None:
    """Layouts are drawn from few boxes, and equal ones are written once."""
    report = large()
    assert sum(len(row.parameters) for row in report.modules) >= 700
    assert len(page(report)) < 3 * MEGABYTE
    data = report.as_json()
    assert len(data["layouts"]) < 20
    assert all(len(layout["boxes"]) <= MOST_BOXES for layout in data["layouts"])


def test_700_different_layouts_on_1024_ranks_stay_small() -> None:
    """Even where no two parameters share a layout and no boxes can be drawn as one."""

    def parameter(number: int) -> ParameterRow:
        boxes = [BoxOnRank(rank, (2 * rank + number, 0), (1, 8)) for rank in range(1024)]
        return ParameterRow(f"w{number}", (4096, 8), "float32", 131072, boxes, "every other row")

    report = Report("apart", [], [ModuleRow("", "Model", [parameter(k) for k in range(700)])])
    layouts = report.as_json()["layouts"]
    assert len(layouts) == 700
    assert {layout["left"] for layout in layouts} == {1024 - MOST_BOXES}
    assert len(page(report)) < 3 * MEGABYTE


def test_a_trace_of_1024_different_ranks_stays_small() -> None:
    """Details of some ranks, among them the slowest and the one with the highest peak; sums of all."""
    one = small().runs[1].parts[0]
    assert one.memory is not None

    def part(rank: int) -> RankPart:
        assert one.memory is not None
        peak = one.memory.peak + (rank == 700)
        return replace(one, ranks=(rank,), seconds=one.seconds + (rank == 900), memory=replace(one.memory, peak=peak))

    report = Report("trace", [Run("measured", 1024, [part(rank) for rank in range(1024)], [])])
    parts = report.as_json()["runs"][0]["parts"]
    assert [part["ranks"] for part in parts] == [[(rank, rank)] for rank in range(1024)]
    assert sum(part["detailed"] for part in parts) == MOST_DETAILED
    assert parts[700]["detailed"]
    assert parts[900]["detailed"]
    assert len(page(report)) < 3 * MEGABYTE


def test_thinning_keeps_the_peak() -> None:
    """The largest sum, the maximum of each series, both ends, and the time of the peak."""
    rise = [k % 97 for k in range(50_000)]
    rise[31_234] = 1_000_000
    other = [5] * 50_000
    other[17] = 9_999
    kept = kept_points([rise, other], 50_000, 2_000, always=40_001)
    assert len(kept) <= 2_000
    assert kept == sorted(set(kept))
    assert {0, 17, 31_234, 40_001, 49_999} <= set(kept)


def test_the_peak_of_the_page_is_the_peak_of_the_data() -> None:
    """At the index that the page shows first, all categories add up to it."""
    for report in (small(), large()):
        for run, found in zip(report.runs, report.as_json()["runs"], strict=True):
            for part, shown in zip(run.parts, found["parts"], strict=True):
                assert part.memory is not None
                memory = shown["memory"]
                assert len(memory["times"]) <= 2_000
                total = memory["unit"] * sum(values[memory["peakAt"]] for _, values in memory["series"])
                assert math.isclose(total, part.memory.peak, rel_tol=1e-5)


def test_many_spans_are_merged_and_nothing_is_lost() -> None:
    """Long spans stay as they are; of the others the sums stay, and no merged one covers a long one."""
    bars = [Bar("compute", f"op{k % 5}", "", k * 1e-3, k * 1e-3 + 9e-4, 2, 3, "") for k in range(40_000)]
    bars += [Bar("transfer", "send", "m", k * 0.1, k * 0.1 + 0.05, 7, 0, "") for k in range(400)]
    merged = merged_bars(bars, 5_000)
    assert len(merged) <= 5_000
    assert sum(bar.merged for bar in merged) == len(bars)
    assert sum(bar.bytes for bar in merged) == sum(bar.bytes for bar in bars)
    assert sum(bar.flops for bar in merged) == sum(bar.flops for bar in bars)
    assert [bar for bar in merged if bar.lane == "transfer"] == bars[40_000:]
    assert all(a.end <= b.start for a, b in pairwise(bar for bar in merged if bar.lane == "compute"))


def test_overlapping_spans_are_busy_once() -> None:
    """A lane's time is the time in which something is in it."""
    times = [(0.0, 2.0), (1.0, 3.0), (1.5, 1.75), (5.0, 6.0)]
    bars = [Bar("transfer", "", "", start, end, 0, 0, "") for start, end in times]
    assert busy_seconds(bars) == {"transfer": 4.0}


def test_boxes_of_many_ranks_are_drawn_as_one() -> None:
    """Neighbours that make up a box; copies; and what cannot be joined stays as it is."""
    rows = drawn_boxes((rank, (rank, 0), (1, 8)) for rank in range(1024))
    assert len(rows) == 16
    assert rows[0] == (tuple(range(64)), (0, 0), (64, 8), 64)
    grid = drawn_boxes((rank, (rank // 32, rank % 32), (1, 1)) for rank in range(1024))
    assert len(grid) == 16
    copies = drawn_boxes((rank, (0,), (8,)) for rank in range(1024))
    assert copies == [(tuple(range(1024)), (0,), (8,), 1)]
    apart = drawn_boxes((rank, (2 * rank,), (1,)) for rank in range(100))
    assert len(apart) == 100
    assert drawn_boxes([(3, (), ())]) == [((3,), (), (), 1)]


def test_traffic_of_many_ranks_is_in_blocks() -> None:
    """No byte is lost."""
    links = [(source, (source + 1) % 1024, source) for source in range(1024)]
    block, cells = traffic_blocks(links, 1024)
    assert block == 16
    assert sum(count for *_, count in cells) == sum(range(1024))
    assert traffic_blocks([(0, 1, 5)], 4) == (1, [(0, 1, 5)])
    assert rank_ranges([6, 0, 2, 1]) == [(0, 2), (6, 6)]


def test_no_name_can_leave_its_place() -> None:
    """Names of any characters stay data: in the page, in its title, and in a notebook."""
    text = page(tiny(HOSTILE))
    assert HOSTILE not in text
    assert text.count("</script>") == 2
    assert "<b>" not in text
    assert f"<title>{html.escape(HOSTILE)}</title>" in text
    data = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["title"] == HOSTILE
    frame = notebook(tiny(HOSTILE))
    assert frame.count("<") == 2
    assert html.escape(text) in frame


def test_a_page_is_saved_and_loads_nothing(tmp_path: Path) -> None:
    """One file; its policy forbids requests, and no address is in it but that of a namespace."""
    path = save_page(small(), tmp_path / "step.html")
    text = path.read_text(encoding="utf-8")
    assert text == page(small())
    assert "default-src 'none'" in text
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}


def test_a_series_must_have_a_value_for_each_time() -> None:
    """The error gives the numbers."""
    with pytest.raises(ReportError, match=r"'activations' has 1 values for 2 times"):
        Memory([0.0, 1.0], {"activations": [1]}, 1, 0.0, [])


def test_empty_parts_are_no_problem() -> None:
    """A report may have anything left out."""
    part = RankPart((0,), "cpu", None, 0.0, 0, 0, 0, None, (), ())
    bare = RankPart((1,), "cpu", GIB, 0.0, 0, 0, 0, Memory((), {}, 0, 0.0, ()), [Span("wait", "", "", 0, 0)], [])
    cost = [ModuleCost("", "", 0.0, 0, 0, 0)]
    for report in (Report("nothing", []), Report("little", [Run("r", 2, [part, replace(bare, modules=cost)], [])])):
        assert json.loads(json.dumps(report.as_json(), allow_nan=False))["title"] == report.title


def test_the_assets_are_next_to_the_code() -> None:
    """Every script that the page names is a file of the package, and none is left over."""
    folder = Path(page.__code__.co_filename).parent / "assets"
    assert {path.stem for path in folder.glob("*.js")} == set(SCRIPTS)
