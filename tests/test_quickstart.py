"""The quickstart's files run as they stand, on the ranks that it says, and print what it shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.torchrun import run_script

from shardwise.testing import RankFailure, run_on_ranks

TEXT = (Path(__file__).parent.parent / "docs" / "quickstart.md").read_text()
BLOCKS = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", TEXT, flags=re.DOTALL)
SHOWN = re.findall(r"```\n(.*?)```", re.sub(r"```\w+\n.*?```", "", TEXT, flags=re.DOTALL), flags=re.DOTALL)
COMMANDS = re.findall(r"^torchrun --nproc-per-node (\d+) (\w+\.py)$", TEXT, flags=re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files that a reader has made, block by block."""
    for name, block in BLOCKS:
        with open(tmp_path / name, "a") as file:
            file.write(block)
    return tmp_path


def test_every_block_says_its_file_and_every_file_is_run() -> None:
    """So that no code on the page goes untested."""
    assert len(BLOCKS) == TEXT.count("```python")
    assert {name for name, _ in BLOCKS} == {
        *("reader.py", "first.py", "again.py", "whole.py", "own_data.py", "wrong.py")
    }
    assert COMMANDS == [("4", "first.py"), ("3", "again.py"), ("2", "again.py"), ("4", "own_data.py")]


def test_the_files_train_go_on_elsewhere_and_come_home(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the commands' files and numbers of ranks; the twins agree to the last digit that is printed."""
    for world_size, name in COMMANDS:
        run_on_ranks(int(world_size), run_script, str(folder / name), str(folder), fresh=True, echo=True)
    printed = capsys.readouterr().out
    assert SHOWN[0] in printed
    assert SHOWN[1].replace("\n", " ").strip() in printed
    losses = re.findall(r"step (\d+).*: loss (\S+), one process (\S+)", printed)
    assert [(int(step), loss) for step, loss, _ in losses] == [
        (step, twin) for step, (_, _, twin) in zip((30, 45, 60), losses, strict=True)
    ]
    done = subprocess.run([sys.executable, "whole.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+% right\n", done.stdout)


def test_the_mistake_is_told_as_shown(folder: Path) -> None:
    """On every rank alike: the pool tells identical failures once."""
    with pytest.raises(RankFailure) as caught:
        run_on_ranks(4, run_script, str(folder / "wrong.py"), str(folder), fresh=True)
    assert SHOWN[2] in str(caught.value)
    assert "rank 0 and rank 1 and rank 2 and rank 3 of 4 failed" in str(caught.value)
