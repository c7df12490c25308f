"""The quickstart's files run as they stand, on the ranks that it says, and print what it shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pages import Page
from tests.torchrun import run_script

from shardwise.testing import run_on_ranks

PAGE = Page("quickstart.md")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files that a reader has made, block by block."""
    for name, code in PAGE.files.items():
        (tmp_path / name).write_text(code)
    return tmp_path


def test_every_block_says_its_file_and_every_file_is_run() -> None:
    """So that no code on the page goes untested."""
    assert set(PAGE.files) == {"reader.py", "first.py", "again.py", "whole.py"}
    assert PAGE.commands == [("4", "first.py"), ("3", "again.py"), ("2", "again.py"), ("python", "whole.py")]


def test_the_files_train_go_on_elsewhere_and_come_home(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the commands' files and numbers of ranks; the twins agree to the last digit that is printed."""
    for world_size, name in PAGE.commands[:-1]:
        run_on_ranks(int(world_size), run_script, str(folder / name), str(folder), fresh=True, echo=True)
    printed = capsys.readouterr().out
    (shown,) = PAGE.blocks("text")
    assert shown in printed
    losses = re.findall(r"step (\d+).*: loss (\S+), one process (\S+)", printed)
    assert [(int(step), loss) for step, loss, _ in losses] == [
        (step, twin) for step, (_, _, twin) in zip((30, 45, 60), losses, strict=True)
    ]
    done = subprocess.run([sys.executable, "whole.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+% right\n", done.stdout)
