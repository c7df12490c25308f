"""A checkpoint of four ranks, and the command line called as a function."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tools.cli.states import Cli, save_sharded

from shardwise.testing import run_on_ranks
from shardwise.tools.cli import main


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of four ranks."""
    path = str(tmp_path_factory.mktemp("cli") / "saved")
    run_on_ranks(4, save_sharded, path)
    return path


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs a command in a new folder; gives the exit code and what was printed on stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        return code, *capsys.readouterr()

    return run
