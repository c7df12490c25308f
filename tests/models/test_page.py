"""The page on whole models runs as it stands."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from tests.clients.environment import launched

from shardwise.testing import run_on_ranks

PAGE = Path(__file__).parent.parent.parent / "docs" / "models.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def run_page(folder: str) -> None:
    """All blocks, one after the other, as one script in a folder of its own."""
    os.chdir(folder)
    with launched():
        exec(compile("".join(BLOCKS), str(PAGE), "exec"), {"__name__": "__main__"})


def test_the_page_runs_as_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Asserts included; it prints what it says, and leaves the folders that it names."""
    run_on_ranks(2, run_page, str(tmp_path), fresh=True, echo=True, timeout=110)
    assert "torch.Size([2, 10])" in capsys.readouterr().out
    assert {"finished", "trained"} <= {folder.name for folder in tmp_path.iterdir()}
