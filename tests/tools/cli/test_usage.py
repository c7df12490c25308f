"""What all commands have in common: errors in one line, help, terminals, pipes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tools.cli.states import Cli

import shardwise
from shardwise_command.usage import byte_count

WRONG = [
    ("inspect nowhere", "there is no checkpoint at"),
    ("inspect othr", "nothing is there; did you mean '"),
    ("inspect plan", "is neither a file of torch.save nor of safetensors"),
    ("inspect .", "is no checkpoint of a known format"),
    ("verify nowhere", "there is no checkpoint at"),
    ("verify", "the following arguments are required: PATH; see 'shardwise verify --help'"),
    ("frobnicate", "there is no command 'frobnicate'"),
    ("inspect SAVED --tensor x", "has no tensor 'x'; there are model/layers.0.weight"),
    ("inspect SAVED --tensor layers.1.bias", "has no tensor 'layers.1.bias'; did you mean 'model/layers.1.bias'?"),
    ("inspect SAVED --tensor model/layer.1.bas", "did you mean 'model/layers.1.bias'?"),
    ("inspect SAVED --only modl/*", "nothing matches 'modl/*'; did you mean 'model/*'?"),
    ("extract SAVED *.wieght out.safetensors", "nothing matches '*.wieght'; did you mean '*.weight'?"),
    ("convert SAVED out --to dcp --rename modl/*=*", "--rename 'modl/*=*' matches nothing; did you mean 'model/*'?"),
    ('reshard SAVED out --ranks 2 --plan {"*.wieght":0}', "matches '*.wieght' (did you mean '*.weight'?)"),
    ("inspect SAVED --only zzz*", "nothing matches 'zzz*'; there are"),
    ("extract SAVED zzz out.safetensors", "nothing matches 'zzz'"),
    ("extract SAVED step out.safetensors", "step: no tensor"),
    ("extract SAVED scale out.txt", "ends with .safetensors, found 'out.txt'"),
    ("extract SAVED scale no/out.safetensors", "there is no folder"),
    ("reshard SAVED out", "one of the arguments --ranks --mesh is required"),
    ("reshard SAVED out --ranks 0", "'0' is no number of ranks"),
    ("reshard SAVED SAVED --ranks 2 --overwrite", "is what is read"),
    ("reshard SAVED other --ranks 2", "there is a checkpoint at 'other': --overwrite replaces it"),
    ("reshard SAVED full --ranks 2 --overwrite", "'full' holds something else"),
    ("reshard SAVED plan --ranks 2", "'plan' is a file"),
    ("reshard SAVED plan/out --ranks 2", "Not a directory"),
    ("reshard SAVED out --ranks 2 --plan nowhere", "No such file or directory: 'nowhere'"),
    ('reshard SAVED out --ranks 2 --plan {"nope*":0}', "no tensor matches 'nope*' (there are"),
    ('reshard SAVED out --ranks 2 --plan {"*":1}', "there is no dim 1, for its size is (24,)"),
    ('reshard SAVED out --ranks 2 --plan {"*":', "is not JSON"),
    ("reshard SAVED out --ranks 2 --plan [1]", "should be an object"),
    ('reshard SAVED out --ranks 2 --plan {"*":"rows"}', "a rule is a dim, null"),
    ('reshard SAVED out --ranks 2 --plan {"*":[0,1]}', "for each of the 1 axes of --mesh"),
    ("convert SAVED full --to safetensors", "'full' is not empty"),
    ("convert SAVED plan --to torch", "'plan' is there: --overwrite replaces it"),
    ("convert SAVED out --to zip", "'zip' is no format"),
    ("convert SAVED out --to dcp --dtype int8", "int8 is no floating-point dtype"),
    ("convert SAVED out --to dcp --rename x=y", "--rename 'x=y' matches nothing"),
    ("convert SAVED out --to dcp --rename x", "should be OLD=NEW"),
    ("convert SAVED out --to dcp --rename *=same", "would get one name, 'same'"),
    ("convert SAVED out --to dcp --rename model/ids=scale/ids", "'scale' is a name of an entry"),
    ("convert s3:/x out --to dcp", "looks like a URL that lost a slash"),
    ("diff SAVED SAVED --rtol -1", "'-1' is no tolerance"),
    ("diff SAVED other --max-memory 12x", "'12x' is no number of bytes"),
]


@pytest.mark.parametrize(("line", "says"), WRONG)
def test_what_cannot_be_is_said_in_one_line(cli: Cli, saved: str, line: str, says: str) -> None:
    """On stderr, with exit code 2, and nothing is written."""
    shardwise.save({"x": torch.ones(1)}, "other")
    os.mkdir("full")
    for path in ("plan", "full/file"):
        Path(path).write_text("something")
    words = [saved if word == "SAVED" else word for word in line.split()]
    if words[-1][0] in "{[":
        Path("given").write_text(words[-1])
        words[-1] = "given"
    there = sorted(path for path in Path().rglob("*"))
    code, out, err = cli(*words)
    assert (code, out) == (2, "")
    assert err.startswith("shardwise: ")
    assert err.count("\n") == 1
    assert says in err
    assert sorted(path for path in Path().rglob("*")) == there


def test_numbers_of_bytes_are_read_as_people_write_them() -> None:
    """With units of a thousand and of 1,024."""
    read = {text: byte_count(text) for text in ("12B", "1.5KB", "2k", "3 MiB", "4GiB", "1e9", "1tb")}
    assert list(read.values()) == [12, 1500, 2000, 3 * 2**20, 2**32, 10**9, 10**12]
    assert byte_count(str(2**20)) == 2**20
    for text in ("80", "80.5", "1e5"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' has no unit: write {text}GiB, or {text}B"):
            byte_count(text)


def test_every_command_has_help_with_an_example(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """That fits 80 columns, but for examples."""
    monkeypatch.setenv("COLUMNS", "80")
    for command in (
        "inspect",
        "verify",
        "diff",
        "reshard",
        "convert",
        "extract",
        "merge",
        "plan",
        "estimate",
        "doctor",
    ):
        code, out, _ = cli(command, "--help")
        text, _, examples = out.partition("\nexamples:\n")
        assert code == 0
        assert max(map(len, text.splitlines())) <= 80
        assert f"shardwise {command} " in examples
    assert cli("--version")[1].startswith("shardwise ")


def test_a_terminal_gets_colours_and_a_bar_if_rich_is_there(
    cli: Cli, saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without rich the words are the same."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    rich = cli("verify", saved)
    assert "\x1b[32mwhole: 6 tensors" in rich[1]
    assert "verifying" in rich[2]
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    bare = cli("verify", saved)
    assert bare[1].startswith("whole: 6 tensors")
    assert "verifying" in bare[2]


def test_a_real_process_gives_json_ends_quietly_with_its_reader_and_is_interrupted(
    cli: Cli, saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a shell calls it."""
    command = f"{sys.executable} -m shardwise.tools.cli inspect {saved}"
    run = subprocess.run(
        [
            "bash",
            "-c",
            f"{command} --json | {sys.executable} -c 'import json, sys; json.load(sys.stdin)'; {command} | true",
        ],
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")

    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardwise.tools.cli.show.open_archive", interrupted)
    assert cli("inspect", saved) == (2, "", "shardwise: interrupted\n")
