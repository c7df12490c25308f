"""The tutorial's job, in float64: a run that goes on with other ranks is the run that never ended."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.pages import Page
from tests.torchrun import run_script

from shardwise.testing import run_on_ranks

PAGE = Page("tutorials/fine-tune.md")
STEPS = 3  # of a run; each takes two batches, and an epoch has seven, the last one of nine rows


def _files(folder: Path, steps: int) -> None:
    """The page's files, in float64, with so many steps a run, and a line and a checkpoint for each step."""
    folder.mkdir()
    files = dict(PAGE.files)
    changes = {
        "begin + 17": f"begin + {steps + 1}",
        "every=8": "every=1",
        "step % 8 == 0": "True",
        ":.4f}": ":.12f}",
        'torch.autocast("cpu", torch.bfloat16)': 'torch.autocast("cpu", torch.bfloat16, enabled=False)',
        "torch.optim.AdamW, lr=5e-3": "torch.optim.SGD, lr=0.1, momentum=0.9",  # which amplifies no rounding
        'load("base", ': 'load("base", dtype=torch.float64, ',
    }
    for before, after in changes.items():
        assert files["tune.py"].count(before) == 1, before
        files["tune.py"] = files["tune.py"].replace(before, after)
    for name, code in files.items():
        (folder / name).write_text(code)


def test_a_job_that_goes_on_with_fewer_ranks_is_the_job_that_never_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same batches, dropout, learning rates and losses; the last batch of the first epoch is short."""
    printed = {}
    for name, worlds in (("ended", (4, 2)), ("whole", (2,))):
        folder = tmp_path / name
        _files(folder, 2 * STEPS // len(worlds))
        run_on_ranks(1, run_script, str(folder / "base.py"), str(folder))
        for world_size in worlds:
            run_on_ranks(world_size, run_script, str(folder / "tune.py"), str(folder), echo=True)
        printed[name] = re.findall(r"step (\d+) on \d ranks: (\d+) rows, loss (\S+),", capfd.readouterr().out)
    assert [int(step) for step, _, _ in printed["ended"]] == list(range(1, 2 * STEPS + 1))
    assert len({rows for _, rows, _ in printed["ended"]}) > 1
    assert [rows for _, rows, _ in printed["ended"]] == [rows for _, rows, _ in printed["whole"]]
    ended, whole = ([float(loss) for _, _, loss in printed[name]] for name in ("ended", "whole"))
    assert ended == pytest.approx(whole, abs=1e-6)  # transformers rounds norms and scores to float32
