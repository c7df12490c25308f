"""Every block of Python in the documentation runs, on real ranks, and prints what its page shows."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from tests.pages import DOCS, SCRIPT, Page

import shardwise

# What other tests run, which look at more than this one does.
ELSEWHERE = {
    ("quickstart.md", "first.py"): "test_quickstart.py",
    ("tutorials/fine-tune.md", "data.py"): "test_fine_tune.py",
    ("models.md", SCRIPT): "models/test_page.py",
    ("performance.md", SCRIPT): "comm/test_tracing.py",
    ("migrating.md", "train.py"): "test_readme.py",
    ("howto/lightning.md", "train.py"): "interop/clients/test_lightning.py",
}
PAGES = [Page(path.relative_to(DOCS).as_posix()) for path in sorted(DOCS.glob("**/*.md")) if "_build" not in path.parts]
OTHERS = {page for page, _ in ELSEWHERE} - {"migrating.md", "tutorials/fine-tune.md"}
WITH_CODE = [page for page in PAGES if page.files and page.name not in OTHERS]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_page_runs_as_it_stands_and_prints_what_it_shows(
    page: Page, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asserts included; all of its files are run."""
    page.run(tmp_path)
    assert page.not_in(capsys.readouterr().out) == []
    run = {file for _, file in page.commands} | {file for name, file in ELSEWHERE if name == page.name}
    assert set(page.files) == run


def test_what_is_run_elsewhere_is_run_there() -> None:
    """By tests that name the page."""
    for (name, file), test in ELSEWHERE.items():
        assert file in Page(name).files
        assert f'"{name}"' in (Path(__file__).parent / test).read_text()


def test_every_block_says_its_language() -> None:
    """So that no code goes unseen."""
    for page in PAGES:
        opened = re.findall(r"^```(.*)$", page.text, flags=re.MULTILINE)[::2]
        assert {one for one in opened if not one.startswith("{")} <= {"python", "text", "sh"}, page.name


def test_the_reference_has_every_public_name_once() -> None:
    """Those of `shardwise` itself, but for its modules; errors have a page of their own."""
    reference = "".join(page.text for page in PAGES if page.name.startswith("reference/"))
    documented = re.findall(r"^\.\. auto(?:function|class|data):: shardwise\.(\w+)$", reference, flags=re.MULTILINE)
    public = {name for name in shardwise.__all__ if not isinstance(getattr(shardwise, name), ModuleType)}
    assert sorted(documented) == sorted(public - {"ShardwiseError"})
    listed = re.findall(r"^   (\w+)$", Page("reference/index.md").text, flags=re.MULTILINE)
    assert sorted(listed) == sorted(documented)
    errors = re.findall(r"^\.\. autoexception:: shardwise\.errors\.(\w+)$", reference, flags=re.MULTILINE)
    assert sorted(errors) == sorted(name for name, value in vars(shardwise.errors).items() if isinstance(value, type))
