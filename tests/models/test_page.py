"""The page on whole models runs as it stands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.interop.clients.environment import launched
from tests.pages import SCRIPT, Page

from shardwise.testing import run_on_ranks

PAGE = Page("models.md")


def run_page(folder: str) -> None:
    """All blocks, one after the other, as one script in a folder of its own."""
    os.chdir(folder)
    with launched():
        exec(compile(PAGE.files[SCRIPT], PAGE.name, "exec"), {"__name__": "__main__"})


def test_the_page_runs_as_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Asserts included; it prints what it says, and leaves the folders that it names."""
    run_on_ranks(2, run_page, str(tmp_path), fresh=True, echo=True)
    printed = capsys.readouterr().out
    assert PAGE.not_in(printed) == []
    assert "torch.Size([2, 10])" in printed
    assert {"finished", "trained"} <= {folder.name for folder in tmp_path.iterdir()}
