"""The examples print what they promise."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "tensor_parallel.py"


def losses_agree(printed: str) -> bool:
    """Whether the model learns, and as its twin does, to the last digit that is printed."""
    rows = [line.split() for line in printed.splitlines() if line.strip()[:1].isdigit()]
    return len(rows) == 5 and all(sharded == plain for _, sharded, plain in rows) and rows[4][1] < rows[0][1]


def test_the_sharded_model_trains_as_its_twin(capsys: pytest.CaptureFixture[str]) -> None:
    """On ranks that the example starts by itself."""
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert losses_agree(capsys.readouterr().out)


def test_the_same_under_torchrun() -> None:
    """With its ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert losses_agree(done.stdout)
