"""The command line, called as a function: what it prints, what it writes, exit codes, and errors in one line."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.cases import chunks
from torch.distributed.checkpoint import load as load_dcp

import shardwise
from shardwise import zeros
from shardwise.archive import Archive, open_archive
from shardwise.cli import doctor, main
from shardwise.cli.usage import byte_count
from shardwise.sharding_spec import ChunkShardingSpec
from shardwise.testing import RankFailure, run_on_ranks

Cli = Callable[..., tuple[int, str, str]]


def plain_state(step: int = 7) -> dict[str, Any]:
    """Tensors of several dtypes and sizes, tied ones, and values."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.rand(40, 24, generator=generator)
    return {
        "model": {
            "layers.0.weight": weight,
            "layers.1.weight": torch.rand(24, 40, generator=generator),
            "layers.1.bias": torch.rand(24, generator=generator).to(torch.bfloat16),
            "head.weight": weight,
            "ids": torch.arange(5) + 2**60,
        },
        "scale": torch.tensor(0.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "step": step,
        "lr": math.nan,
        "history": [1, 2.5, "x"],
        "blob": b"\x00\xff",
    }


def save_sharded(path: str) -> None:
    """The state as four ranks write it, in rows and columns."""
    state = plain_state()
    model = state["model"]
    model["layers.0.weight"] = model["head.weight"] = shardwise.shard(model["head.weight"], 0)
    model["layers.1.weight"] = shardwise.shard(model["layers.1.weight"], 1)
    shardwise.save(state, path)


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


def holds(path: str, state: dict[str, Any]) -> None:
    """Assert that a checkpoint loads into plain tensors with the values of a state."""

    def zeros(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: zeros(inner) for key, inner in value.items()}
        return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, dict):
            return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
        if isinstance(one, torch.Tensor):
            return one.dtype == other.dtype and torch.equal(one, other)
        return bool(one == other or (one != one and other != other))

    assert same(shardwise.load(zeros(state), path), state)


# Looking --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 120])
def test_inspect_shows_tensors_files_layouts_and_values_within_the_terminal(
    cli: Cli, saved: str, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """And the same in JSON, whose numbers are right."""
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = cli("inspect", saved, "--layouts")
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines() if saved not in line) <= columns
    for words in (
        "4 chunks of rows",
        "4 chunks of columns",
        "float64",
        "40×24",
        "history",
        "[1, 2.5, 'x']",
        "nan",
        "┌",
    ):
        assert words in out
    code, out, _ = cli("inspect", saved, "--json")
    found = json.loads(out)
    assert found["tensors"]["model/layers.1.weight"] == {
        "dtype": "float32",
        "size": [24, 40],
        "nbytes": 24 * 40 * 4,
        "layout": "4 chunks of columns",
        "files": list(found["files"]),
    }
    assert sum(file["tensor_nbytes"] for file in found["files"].values()) == found["nbytes"]
    assert found["nbytes"] == 2 * 40 * 24 * 4 + 24 * 2 + 5 * 8 + 8  # the tied one once
    assert {name: file["nbytes"] for name, file in found["files"].items()} == {
        file.name: file.stat().st_size for file in Path(saved).glob("*.safetensors")
    }
    assert (found["values"]["step"], found["values"]["lr"]) == (7, "nan")


def test_inspect_shows_one_tensor_and_what_a_pattern_matches(cli: Cli, saved: str) -> None:
    """Its boxes, where each begins, and its other names."""
    code, out, _ = cli("inspect", saved, "--tensor", "model/head.weight", "--json")
    found = json.loads(out)
    assert (code, found["tied"], len(found["boxes"])) == (0, ["model/layers.0.weight"], 4)
    box = found["boxes"][1]
    data = (Path(saved) / box["file"]).read_bytes()[box["begin"] : box["begin"] + box["nbytes"]]
    assert data == plain_state()["model"]["head.weight"][10:20].numpy().tobytes()
    assert "also called  model/layers.0.weight" in cli("inspect", saved, "--tensor", "model/head.weight")[1]
    _, out, _ = cli("inspect", saved, "--only", "model/*.bias", "--only", "st*", "--json")
    assert (list(json.loads(out)["tensors"]), list(json.loads(out)["values"])) == (["model/layers.1.bias"], ["step"])


def test_verify_lists_all_damage_and_exits_with_1(cli: Cli, saved: str, tmp_path: Path) -> None:
    """Flipped bytes by tensor, box and file; a file that is gone; an index that is cut off."""
    assert cli("verify", saved)[:2] == (0, "whole: 6 tensors, 7.6 KiB in 4 files\n")
    bad = shutil.copytree(saved, tmp_path / "bad")
    with open_archive(bad) as archive:
        for name, row in (("model/layers.0.weight", 1), ("model/layers.1.weight", 2)):
            spot: Any = archive.spot(archive.index.tensors[name], row)
            with open(bad / spot.file, "r+b") as file:
                file.seek(spot.begin + 7)
                flipped = file.read(1)[0] ^ 16
                file.seek(spot.begin + 7)
                file.write(bytes([flipped]))
    code, out, _ = cli("verify", bad, "--json")
    damage = json.loads(out)["damage"]
    assert (code, len(damage)) == (1, 2)
    assert "[10:20, 0:24] of tensor 'model/layers.0.weight' in file 'rank-00001" in damage[0]
    assert "[0:24, 20:30] of tensor 'model/layers.1.weight' in file 'rank-00002" in damage[1]
    for command in (["diff", saved, bad], ["reshard", bad, "n", "--ranks", "2"], ["convert", bad, "n", "--to", "dcp"]):
        code, out, err = cli(*command)
        assert (code, out, os.path.exists("n")) == (2, "", False)
        assert "is damaged: [10:20, 0:24] of tensor 'model/layers.0.weight'" in err
    os.remove(next(bad.glob("rank-00003*")))
    assert cli("verify", bad)[1].count("\n") == 4
    os.truncate(bad / "index.json", 90)
    code, out, _ = cli("verify", bad)
    assert (code, "is not JSON" in out) == (1, True)


# Comparing ------------------------------------------------------------------------------------------------------------


def test_diff_finds_every_kind_of_difference(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, sizes, dtypes, values of state, one unit of a large integer, and the largest difference and its place."""
    first, second = plain_state(), plain_state()
    second["model"]["layers.1.weight"][3, 5] += 0.25
    second["model"]["layers.1.weight"][4, 6] -= 0.5
    second["model"]["ids"][2] += 1
    second["model"]["layers.1.bias"] = second["model"]["layers.1.bias"].float()
    second["scale"] = torch.zeros(2)
    second["step"] = 8
    del second["empty"]
    second["new"] = 1
    shardwise.save(first, "a")
    torch.save(second, "b.pt")
    code, out, _ = cli("diff", "a", "b.pt", "--json", "--max-memory", "1KB")
    found = json.loads(out)
    assert (code, found["different"]) == (1, True)
    assert (found["only_in_a"], found["only_in_b"]) == (["empty"], ["new"])
    assert found["sizes"] == {"scale": [[], [2]]}
    assert found["dtypes"] == {"model/layers.1.bias": ["bfloat16", "float32"], "scale": ["float64", "float32"]}
    assert found["state"] == {"step": [7, 8]}
    values = found["values"]
    assert list(values) == ["model/layers.1.weight", "model/ids"]
    assert (values["model/ids"]["elements"], values["model/ids"]["at"]) == (1, [2])
    assert (values["model/layers.1.weight"]["elements"], values["model/layers.1.weight"]["at"]) == (2, [4, 6])
    assert values["model/layers.1.weight"]["largest"] == pytest.approx(0.5, abs=1e-7)
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = cli("diff", "a", "b.pt")
    assert max(map(len, out.splitlines())) <= 80
    assert "different: 2 names, 1 size, 2 dtypes, 2 tensors, 1 value\n" in out
    only = ("--only", "model/layers.1.weight")
    assert cli("diff", "a", "b.pt", *only, "--atol", "0.3")[0] == 1
    assert cli("diff", "a", "b.pt", *only, "--atol", "0.51")[0] == 0


@pytest.mark.parametrize(("a", "b", "rtol", "code"), [
    ([math.nan, math.inf], [math.nan, math.inf], 0, 0),
    ([math.nan, 1.0], [1.0, 1.0], 1, 1),
    ([math.inf, 1.0], [-math.inf, 1.0], 0.5, 1),
    ([1.0, 2.0], [1.0, math.inf], 0.5, 1),
    ([0.0, 100.0], [0.0, 101.0], 0.01, 0),
    ([0.0, 100.0], [0.0, 102.0], 0.01, 1),
    ([0.0], [-0.0], 0, 0),
])  # fmt: skip
def test_diff_takes_what_is_not_finite_as_it_is(
    cli: Cli, a: list[float], b: list[float], rtol: float, code: int
) -> None:
    """nan is nan, infinity is itself and nothing else, and the tolerance is relative to B."""
    torch.save({"x": torch.tensor(a)}, "a.pt")
    torch.save({"x": torch.tensor(b)}, "b.pt")
    assert cli("diff", "a.pt", "b.pt", "--rtol", rtol)[0] == code


# Rewriting ------------------------------------------------------------------------------------------------------------


def load_on_ranks(path: str) -> None:
    """Load on other ranks than those that it was written for, and compare."""
    plain = plain_state()["model"]
    target = {"layers.0.weight": zeros(chunks(1, 0, 1), 40, 24), "layers.1.weight": zeros(chunks(0, 0, 1), 24, 40)}
    shardwise.load({"model": target}, path, strict=False)
    assert torch.equal(target["layers.0.weight"].full_tensor(), plain["layers.0.weight"])
    assert torch.equal(target["layers.1.weight"].full_tensor(), plain["layers.1.weight"])


def test_reshard_writes_what_ranks_with_these_layouts_would(
    cli: Cli, saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File by file the same boxes; nothing larger than the limit is read at a time, and any job can load it."""
    read: list[int] = []
    read_box = Archive.read_box

    def noted(self: Archive, *args: Any, **options: Any) -> torch.Tensor:
        made = read_box(self, *args, **options)
        read.append(made.nbytes)
        return made

    monkeypatch.setattr(Archive, "read_box", noted)
    plan = {
        "model/layers.0.weight": 1,
        "*bias": None,
        "model/layers.1.*": {"dim": 0, "weights": [2, 1, 1, 1, 1, 1, 1, 0]},
    }
    Path("plan.json").write_text(json.dumps(plan))
    code, _, err = cli("reshard", saved, "eight", "--ranks", "8", "--plan", "plan.json", "--max-memory", "1KB")
    assert (code, err, max(read) <= 1000) == (0, "", True)
    holds("eight", plain_state())
    run_on_ranks(2, load_on_ranks, os.path.abspath("eight"))
    with open_archive("eight") as archive:
        layout = archive.index.tensors["model/layers.0.weight"].layout
        wanted = ChunkShardingSpec(1, [f"rank:{rank}/cpu" for rank in range(8)]).layout((40, 24))
        assert layout == wanted
        weighted = archive.index.tensors["model/layers.1.weight"].layout
        assert [weighted.extent(row)[0] for row in range(8)] == [6, 3, 3, 3, 3, 3, 3, 0]
    assert cli("verify", "eight")[0] == 0
    Path("plan.json").write_text('{"model/*weight": [1, 0], "*": [null, 0]}')
    assert cli("reshard", saved, "mesh", "--mesh", "2x3", "--plan", "plan.json")[0] == 0
    holds("mesh", plain_state())
    assert "2 × 3 grid" not in cli("inspect", "mesh", "--only", "*.bias")[1]
    assert "3 × 2 grid" in cli("inspect", "mesh", "--only", "*.weight")[1]
    assert cli("reshard", saved, "mesh", "--ranks", "1")[0] == 2
    assert cli("reshard", saved, "mesh", "--ranks", "1", "--overwrite")[0] == 0
    assert sorted(os.listdir("mesh"))[0] == "index.json"
    assert len(os.listdir("mesh")) == 2  # the older files are gone
    holds("mesh", plain_state())


def test_checkpoints_at_urls_are_read_and_written(cli: Cli, saved: str) -> None:
    """As at paths; what is there is not replaced unasked."""
    url = "memory://cli/new"
    assert cli("reshard", saved, url, "--ranks", "2")[0] == 0
    assert cli("diff", saved, url)[0] == 0
    assert cli("verify", url)[0] == 0
    assert "--overwrite" in cli("reshard", saved, url, "--ranks", "3")[2]
    assert cli("reshard", saved, url, "--ranks", "3", "--overwrite")[0] == 0
    assert len(json.loads(cli("inspect", url, "--json")[1])["files"]) == 3
    for options, code in (((), 0), ((), 2), (("--overwrite",), 0)):
        assert cli("extract", url, "scale", "memory://cli/one.safetensors", *options)[0] == code
    assert json.loads(cli("inspect", "memory://cli/one.safetensors", "--json")[1])["nbytes"] == 8
    assert "local paths only" in cli("convert", url, "memory://cli/x.pt", "--to", "torch")[2]


def test_convert_goes_between_all_formats(cli: Cli, saved: str) -> None:
    """Others' own readers read what is written, and back again it is the same."""
    model = plain_state()["model"]
    assert cli("convert", saved, "whole.pt", "--to", "torch", "--max-memory", "2KB")[0] == 0  # through mapped files
    loaded = torch.load("whole.pt", weights_only=True)
    assert all(torch.equal(loaded["model"][name], value) for name, value in model.items())
    assert (loaded["history"], loaded["step"]) == ([1, 2.5, "x"], 7)
    assert cli("convert", "whole.pt", "dcp", "--to", "dcp")[0] == 0
    target: dict[str, Any] = {"model": {name: torch.zeros_like(value) for name, value in model.items()}, "step": 0}
    with pytest.warns(UserWarning, match="single process"):
        load_dcp(target, checkpoint_id="dcp", no_dist=True)
    assert all(torch.equal(target["model"][name], value) for name, value in model.items())
    assert target["step"] == 7
    assert cli("convert", "dcp", "own", "--to", "shardwise")[0] == 0
    assert cli("diff", saved, "own")[0] == 0
    code, _, err = cli("convert", "own", "hf", "--to", "safetensors", "--max-shard-size", "4KB")
    assert (code, "4 values left out" in err) == (0, True)
    index = json.loads(Path("hf/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3  # DCP has tied tensors twice
    found = {k: v for file in Path("hf").glob("*.safetensors") for k, v in safetensors.torch.load_file(file).items()}
    assert all(torch.equal(found[f"model.{name}"], value) for name, value in model.items())
    assert cli("diff", saved, "hf", "--only", "model/*")[0] == 0
    rules = ("--only", "model.layers*", "--rename", "model.layers.*.weight=w/*", "--dtype", "bf16")
    assert cli("convert", "hf", "some.safetensors", "--to", "safetensors", *rules)[0] == 0
    some = safetensors.torch.load_file("some.safetensors")
    assert sorted(some) == ["model.layers.1.bias", "w.0", "w.1"]
    assert torch.equal(some["w.1"], model["layers.1.weight"].to(torch.bfloat16))
    assert sorted(os.listdir()) == ["dcp", "hf", "own", "some.safetensors", "whole.pt"]  # and nothing in between


def test_extract_and_merge_put_whole_tensors_into_one_place(cli: Cli, saved: str) -> None:
    """In a file they keep their names; what is merged has no name in common."""
    model = plain_state()["model"]
    code, out, err = cli("extract", saved, "model/layers.1.*", "scale", "some.safetensors")
    assert (code, err, "wrote 3 tensors" in out) == (0, "", True)
    some = safetensors.torch.load_file("some.safetensors")
    assert torch.equal(some["model/layers.1.weight"], model["layers.1.weight"])
    assert sorted(some) == ["model/layers.1.bias", "model/layers.1.weight", "scale"]
    assert cli("merge", saved, "whole.safetensors")[2].count("left out") == 2  # values, and the tied name
    assert torch.equal(safetensors.torch.load_file("whole.safetensors")["model/layers.0.weight"], model["head.weight"])
    shardwise.save({"other": torch.ones(3), "model": {"more": torch.zeros(2)}}, "other")
    assert cli("merge", saved, "other", "both")[0] == 0
    both = plain_state()
    both["model"]["more"], both["other"] = torch.zeros(2), torch.ones(3)
    holds("both", both)
    code, _, err = cli("merge", saved, "both", "third")
    assert (code, "'model/layers.0.weight' is in" in err, os.path.exists("third")) == (2, True, False)


# Wrong usage ----------------------------------------------------------------------------------------------------------

WRONG = [
    ("inspect nowhere", "there is no checkpoint at"),
    ("inspect plan", "is neither a file of torch.save nor of safetensors"),
    ("inspect .", "is no checkpoint of a known format"),
    ("verify nowhere", "there is no checkpoint at"),
    ("verify", "the following arguments are required: PATH; see 'shardwise verify --help'"),
    ("frobnicate", "invalid choice: 'frobnicate'"),
    ("inspect SAVED --tensor layers.9", "has no tensor 'layers.9'; there are model/layers.0.weight"),
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
    ('reshard SAVED out --ranks 2 --plan {"nope*":0}', "no tensor matches 'nope*' of the plan"),
    ('reshard SAVED out --ranks 2 --plan {"*":1}', "there is no dim 1, for its size is (24,)"),
    ('reshard SAVED out --ranks 2 --plan {"*":', "is not JSON"),
    ("reshard SAVED out --ranks 2 --plan [1]", "should be an object"),
    ('reshard SAVED out --ranks 2 --plan {"*":"rows"}', "a rule is a dim, null"),
    ('reshard SAVED out --ranks 2 --plan {"*":[0,1]}', "for each of the 1 axes of --mesh"),
    ("convert SAVED full --to safetensors", "'full' is not empty"),
    ("convert SAVED plan --to torch", "'plan' is there: --overwrite replaces it"),
    ("convert SAVED out --to zip", "invalid choice: 'zip'"),
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
    read = {text: byte_count(text) for text in ("12", "1.5KB", "2k", "3 MiB", "4GiB", "1e9", "1tb")}
    assert list(read.values()) == [12, 1500, 2000, 3 * 2**20, 2**32, 10**9, 10**12]


def test_every_command_has_help_with_an_example(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """That fits 80 columns, but for examples."""
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("inspect", "verify", "diff", "reshard", "convert", "extract", "merge", "doctor"):
        code, out, _ = cli(command, "--help")
        text, _, examples = out.partition("\nexamples:\n")
        assert code == 0
        assert max(map(len, text.splitlines())) <= 80
        assert f"shardwise {command} " in examples
    assert cli("--version")[1].startswith("shardwise ")


# Terminals, pipes, and the self-test ----------------------------------------------------------------------------------


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
    command = f"{sys.executable} -m shardwise.cli inspect {saved}"
    run = subprocess.run(
        [
            "bash",
            "-c",
            f"{command} --json | {sys.executable} -c 'import json, sys; json.load(sys.stdin)'; {command} | true",
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")

    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardwise.cli.show._all", interrupted)
    assert cli("inspect", saved) == (2, "", "shardwise: interrupted\n")


def test_doctor_says_what_is_here_and_what_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """On real ranks; a failure is shown with its reason, and the exit code is 1."""
    code, out, _ = cli("doctor", "--json")
    found = json.loads(out)
    assert (code, found["ok"], len(found["tests"])) == (0, True, 5)
    assert found["versions"]["torch"] == torch.__version__
    assert found["backends"]["gloo"]

    def broken(ranks: int, test: Callable[..., None], *args: Any) -> None:
        if test is doctor._moves:
            raise RankFailure("rank 1 of 2 failed: no such luck")

    monkeypatch.setattr(doctor, "run_on_ranks", broken)
    code, out, _ = cli("doctor")
    assert (code, "redistribute: rank 1 of 2 failed: no such luck" in out, "1 failed" in out) == (1, True, True)
