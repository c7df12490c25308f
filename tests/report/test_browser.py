"""The page in a real browser: what is drawn, hovered, typed, and reached by keyboard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.report.browser import Browser, found
from tests.report.samples import large, small, tiny

from shardwise.report import Memory, RankPart, Report, Run, notebook, save_page

pytestmark = pytest.mark.skipif(found() is None, reason="neither Chromium nor Chrome is installed")

FOCUSED = """(() => {
  const node = document.activeElement;
  return [node.id || node.className || node.tagName, getComputedStyle(node).outlineStyle];
})()"""
NAMELESS = """[...document.querySelectorAll('[tabindex], svg[role=img], input')]
  .filter((node) => !node.getAttribute('aria-label') && !node.labels?.length).length"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of 4 and 1,024 ranks."""
    folder = tmp_path_factory.mktemp("pages")
    return {make.__name__: save_page(make(), folder / f"{make.__name__}.html") for make in (small, large)}


@pytest.fixture(scope="module")
def started() -> Iterator[Browser]:
    """One browser for all tests of this file."""
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(started: Browser) -> Iterator[Browser]:
    """The browser; a test fails if its page had errors or asked the network for anything."""
    started.problems.clear()
    yield started
    assert started.problems == []


def text(browser: Browser, selector: str) -> str:
    """The visible text of an element."""
    return str(browser.run(f"document.querySelector({json.dumps(selector)}).innerText"))


def tip(browser: Browser) -> str:
    """The text of the tooltip, or nothing where it is hidden."""
    return str(browser.run("document.getElementById('tip').hidden ? '' : document.getElementById('tip').innerText"))


@pytest.mark.parametrize("name", ["small", "large"])
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("dark", [False, True])
def test_no_page_scrolls_sideways(browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool) -> None:
    """On a phone and on a desk, with few and many ranks; every section is there."""
    browser.open(pages[name], width=width, dark=dark)
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    sections = browser.run("[...document.querySelectorAll('main > section')].map((one) => one.id)")
    few = ["memory", "timeline", "differences", "modules", "model", "traffic", "plans", "notes"]
    assert sections == (few if name == "small" else ["memory", "timeline", "modules", "model", "traffic"])
    assert ("Does not fit on ranks 0–511" in text(browser, "#top")) == (name == "large")


def test_the_memory_chart_says_what_is_alive(browser: Browser, pages: dict[str, Path]) -> None:
    """Under the mouse and by keys; at rest the legend shows the peak."""
    browser.open(pages["small"], width=1440)
    peak = text(browser, ".legend .sum dd")
    assert peak in text(browser, "#memory figcaption")
    left, top, width, height = browser.place(".chart.memory")
    browser.mouse("Moved", left + width * 0.3, top + height * 0.6)
    assert "activations" in tip(browser)
    assert "GiB at" in tip(browser)
    browser.mouse("Moved", left + width * 0.3, top - 60)
    assert tip(browser) == ""
    browser.run("document.querySelector('.chart.memory').focus()")
    browser.key("Home")
    assert "at 0 s" in tip(browser)
    browser.key("ArrowRight")
    assert "at 0 s" not in tip(browser)
    browser.key("p")
    assert tip(browser).startswith(peak)
    assert "activations" in browser.run("document.querySelector('.chart.memory').getAttribute('aria-valuetext')")
    browser.key("Escape")
    assert tip(browser) == ""


def test_typing_a_number_goes_to_a_rank(browser: Browser, pages: dict[str, Path]) -> None:
    """Its group is chosen in the list, and all sections show it; the list leads to the first rank of a group."""
    browser.open(pages["large"], width=1440)
    browser.type("#rank", "1000")
    assert "Rank 1000" in text(browser, "#memory figcaption")
    assert text(browser, "#group option:checked").startswith("ranks 896–1023")
    browser.type("#rank", "5000")
    assert browser.run("document.getElementById('rank').getAttribute('aria-invalid')") == "true"
    assert "Rank 1000" in text(browser, "#memory figcaption")
    browser.run(
        "(() => { const l = document.getElementById('group'); l.value = 256; l.dispatchEvent(new Event('change')); })()"
    )
    assert "Rank 256" in text(browser, "#memory figcaption")
    browser.click(".groups li:nth-child(2) button")
    assert "Rank 128" in text(browser, "#memory figcaption")


def test_the_timeline_zooms_pans_and_names_spans(browser: Browser, pages: dict[str, Path]) -> None:
    """By wheel, drag and keys."""
    browser.open(pages["small"], width=1440)
    drawing = "document.querySelector('.spans').toDataURL()"
    whole = browser.run(drawing)
    left, top, width, _ = browser.place(".chart.timeline")
    browser.mouse("Moved", left + 90, top + 60)
    assert "compute" in tip(browser)
    assert "blocks.0" in tip(browser)
    browser.run("document.querySelector('.chart.timeline').focus()")
    browser.mouse("Wheel", left + width / 2, top + 60, deltaX=0, deltaY=-400)
    zoomed = browser.run(drawing)
    assert zoomed != whole
    browser.mouse("Pressed", left + width / 2, top + 60, button="left", clickCount=1)
    browser.mouse("Moved", left + width / 2 - 200, top + 60, button="left")
    browser.mouse("Released", left + width / 2 - 200, top + 60, button="left", clickCount=1)
    assert browser.run(drawing) not in (whole, zoomed)
    browser.key("Home")
    browser.key("ArrowRight")
    first = tip(browser)
    browser.key("ArrowRight")
    assert first != tip(browser)
    browser.key("ArrowDown")
    assert "transfer" in tip(browser)
    browser.key("+")
    assert browser.run(drawing) != whole


def test_modules_are_searched_and_sorted(browser: Browser, pages: dict[str, Path]) -> None:
    """By a part of their name, and by any column."""
    browser.open(pages["small"], width=1440)
    browser.type("#modules .search", "blocks.3.mlp.up")
    assert browser.run("document.querySelectorAll('#modules tbody tr').length") == 1
    assert "blocks.3.mlp.up" in text(browser, "#modules tbody")
    browser.type("#modules .search", "no such module")
    assert "Nothing found" in text(browser, "#modules")
    browser.type("#modules .search", "mlp.up")
    browser.click("#modules thead th:first-child button")
    browser.click("#modules thead th:first-child button")
    assert browser.run("document.querySelector('#modules th[aria-sort]').getAttribute('aria-sort')") == "descending"
    assert text(browser, "#modules tbody th") == "blocks.9.mlp.up"


def test_the_model_opens_as_a_tree_with_boxes(browser: Browser, pages: dict[str, Path]) -> None:
    """Each parameter has a picture of its boxes; a search finds parameters anywhere."""
    browser.open(pages["small"], width=1440)
    browser.click("#model details details:last-of-type > summary")
    browser.type("#model .search", "blocks.7.attn.out.weight")
    assert browser.run("document.querySelectorAll('#model .found .parameter').length") == 1
    assert browser.run("document.querySelectorAll('#model .found rect:not(.empty)').length") == 4
    left, top, width, height = browser.place("#model .found rect:not(.empty)")
    browser.mouse("Moved", left + width / 2, top + height / 2)
    assert "rank 0" in tip(browser)
    assert "0–511" in tip(browser)


@pytest.mark.parametrize(("name", "source"), [("small", "rank 0"), ("large", "ranks 0–15")])
def test_the_matrix_names_ranks(browser: Browser, pages: dict[str, Path], name: str, source: str) -> None:
    """One cell for each pair of ranks, or of blocks of ranks; by mouse and keys."""
    browser.open(pages[name], width=390)
    left, top, width, _ = browser.place(".chart.traffic")
    browser.mouse("Moved", left + width - 4, top + 44)
    assert source in tip(browser)
    browser.run("document.querySelector('.chart.traffic').focus()")
    browser.key("ArrowDown")
    assert "iB" in tip(browser)
    assert source not in tip(browser)


def test_the_colours_follow_the_button(browser: Browser, pages: dict[str, Path]) -> None:
    """Of the page, and of what is drawn on canvases."""
    browser.open(pages["small"], width=1440)
    look = "[getComputedStyle(document.body).backgroundColor, document.querySelector('.spans').toDataURL()]"
    light = browser.run(look)
    browser.click("#theme")
    dark = browser.run(look)
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    assert text(browser, "#theme") == "Light colours"
    browser.click("#theme")
    assert browser.run(look)[0] == light[0]


def test_everything_is_reached_by_tab(browser: Browser, pages: dict[str, Path]) -> None:
    """In the order of the page, each with a name and a visible focus."""
    browser.open(pages["small"], width=1440)
    seen = []
    for _ in range(60):
        browser.key("Tab")
        name, outline = browser.run(FOCUSED)
        seen.append(name)
        assert outline != "none" or name == "BODY"
    wanted = ["skip", "theme", "rank", "group", "chart memory", "chart timeline", "chart traffic"]
    assert [name for name in dict.fromkeys(seen) if name in wanted] == wanted
    assert browser.run(NAMELESS) == 0


def test_charts_of_time_show_the_same_moment(browser: Browser, pages: dict[str, Path]) -> None:
    """What is pointed at in one of them is a line in all others."""
    browser.open(pages["small"], width=1440)
    lines = "[...document.querySelectorAll('line.echo')].map((line) => line.getAttribute('visibility'))"
    assert browser.run(lines) == ["hidden", "hidden"]
    left, top, width, _ = browser.place(".chart.timeline")
    browser.mouse("Moved", left + width / 2, top + 60)
    assert browser.run(lines) == ["visible", "visible"]
    left, top, width, _ = browser.place(".chart.memory")
    browser.mouse("Moved", left + width / 2, top + 100)
    assert browser.run("document.querySelector('i.echo').hidden") is False


def test_ranks_without_details_say_so(browser: Browser, tmp_path: Path) -> None:
    """Of 1,024 different ranks, most have only their sums; the page names those that have more."""
    one = small().runs[1].parts[0]
    parts = [replace(one, ranks=(rank,)) for rank in range(1024)]
    browser.open(save_page(Report("trace", [Run("measured", 1024, parts, [])]), tmp_path / "trace.html"), width=390)
    assert browser.run("document.querySelectorAll('.chart.memory, .chart.timeline').length") == 2
    browser.type("#rank", "1000")
    assert browser.run("document.querySelectorAll('.chart.memory, .chart.timeline').length") == 0
    for section in ("#memory", "#timeline", "#modules"):
        assert "Of rank 1000, the page has only the sums. Ranks with details: 0, 1," in text(browser, section)
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")


def test_a_notebook_shows_the_page_in_a_frame(browser: Browser, tmp_path: Path) -> None:
    """With its scripts run and its styles its own."""
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><body>{notebook(tiny())}", encoding="utf-8")
    browser.open(path, width=1440)
    frame = "document.querySelector('iframe').contentDocument"
    assert browser.run(f"{frame}.querySelector('h1').textContent") == "model"
    assert browser.run(f"{frame}.querySelectorAll('main > section').length") == 7
    assert browser.run("document.querySelectorAll('section').length") == 0


def test_names_of_any_characters_are_text(browser: Browser, tmp_path: Path) -> None:
    """No element comes of them."""
    name = "</script><b>bold</b><img src=x onerror=alert(1)>"
    browser.open(save_page(tiny(name), tmp_path / "hostile.html"), width=390)
    assert browser.run("document.querySelectorAll('main b, main img, header img').length") == 0
    assert browser.run("document.querySelector('h1').textContent") == name
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")


def test_what_is_empty_has_no_section(browser: Browser, tmp_path: Path) -> None:
    """A report of nothing is a title."""
    browser.open(save_page(Report("nothing", []), tmp_path / "nothing.html"), width=390)
    assert browser.run("document.querySelectorAll('main > section').length") == 0
    bare = RankPart((0,), "cpu", None, 0.0, 0, 0, 0, Memory((), {}, 0, 0.0, ()), (), ())
    report = Report("little", [Run("predicted", 1, [bare], [])], notes=["a note"])
    browser.open(save_page(report, tmp_path / "little.html"), width=390)
    assert "a note" in text(browser, "#notes")
