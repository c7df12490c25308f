"""The console script: what it answers without importing torch."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shardwise.tools.cli.running import COMMANDS

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from shardwise_command import main
code = main()
loaded = sorted({"numpy", "rich", "shardwise", "torch"} & sys.modules.keys())
sys.exit(f"imported {loaded}" if loaded else code)
"""


def run(line: str) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of a new process, which fails if it has imported more than it should."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *line.split()], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("line", ["--help", *(f"{command} --help" for command in COMMANDS)])
def test_help_does_not_import_torch(line: str) -> None:
    """Of the program and of every command."""
    code, out, err = run(line)
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: shardwise {line.removesuffix('--help')}".rstrip())


def test_the_version_does_not_import_torch() -> None:
    """Nor anything else of the package."""
    code, out, err = run("--version")
    assert (code, out.split()[0], err) == (0, "shardwise", "")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("frobnicate", f"argument COMMAND: invalid choice: frobnicate (choose from {', '.join(COMMANDS)})"),
        ("", "the following arguments are required: COMMAND"),
        ("diff a b --frobnicate", "unrecognized arguments: --frobnicate"),
        ("merge a b --max-memory 4GiB --frobnicate", "unrecognized arguments: --frobnicate"),
    ],
)
def test_usage_errors_do_not_import_torch(line: str, says: str) -> None:
    """They are one line; Python's versions differ in quotes."""
    code, out, err = run(line)
    assert (code, out, err.replace("'", "")) == (2, "", f"shardwise: {says}; see shardwise --help\n")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("verify", "the following arguments are required: PATH; see 'shardwise verify --help'"),
        ("diff a b --rtol -1", "argument --rtol: '-1' is no tolerance: give a number from 0 on"),
        ("diff a b --max-memory 12x", "argument --max-memory: '12x' is no number of bytes: write 500MB or 4GiB"),
        ("reshard a b --ranks 0", "argument --ranks: '0' is no number of ranks, such as 8 or 2x4"),
    ],
)
def test_wrong_values_do_not_import_torch(line: str, says: str) -> None:
    """Of any option."""
    code, out, err = run(line)
    assert (code, out) == (2, "")
    assert err.startswith(f"shardwise: {says}")


def test_the_project_installs_the_command_and_every_package() -> None:
    """The console script calls `main` of the package that imports no torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"shardwise": "shardwise_command:main"}
    packages = {f"src/{path.name}" for path in (ROOT / "src").iterdir() if (path / "__init__.py").exists()}
    assert set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == packages
