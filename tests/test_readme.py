"""The README's code runs as it stands, and its picture is what an example draws."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pages import Page

from shardwise.testing import ranks, run_on_ranks

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
(TEST,) = [block for block in BLOCKS if "shardwise.testing" in block]
(DROP_IN,) = [block for block in BLOCKS if "shardwise.dropin" in block]
SCRIPT = [block for block in BLOCKS if block not in (TEST, DROP_IN)]


def run_examples(folder: str) -> None:
    """The examples of a script, one after the other, as a reader would type them, in a folder of their own."""
    os.chdir(folder)
    exec(compile("".join(SCRIPT), "README.md", "exec"), {})


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_examples_run_on_any_number_of_ranks(world_size: int, tmp_path: Path) -> None:
    """Asserts included; what they save is there."""
    run_on_ranks(world_size, run_examples, str(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint"]


@ranks(4)
def test_the_test_example_passes() -> None:
    """As it stands in its own file."""
    names: dict[str, object] = {}
    exec(compile(TEST, "README.md", "exec"), names)
    names["test_every_rank_holds_a_row"].on_this_rank()


def test_the_drop_in_example_runs() -> None:
    """In a process of its own; that of the guide for migrating comes after it."""
    subprocess.run([sys.executable, "-c", DROP_IN + Page("migrating.md").files["train.py"]], check=True)


def test_the_picture_in_the_readme_is_what_the_example_draws(capsys: pytest.CaptureFixture[str]) -> None:
    """Line for line."""
    runpy.run_path(str(ROOT / "examples" / "layouts.py"), run_name="__main__")
    picture = (ROOT / "README.md").read_text().split("```")[1].strip()
    assert picture in capsys.readouterr().out
