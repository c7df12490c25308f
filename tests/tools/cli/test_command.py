"""The console script: what it answers without importing torch."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shardwise.tools.cli import main
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


@pytest.mark.parametrize("line", ["--help", *(f"{command} --help" for command in (*COMMANDS, "completion"))])
def test_help_does_not_import_torch(line: str) -> None:
    """Of the program and of every command."""
    code, out, err = run(line)
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: shardwise {line.removesuffix('--help')}".rstrip())


def test_completion_of_a_shell_does_not_import_torch_and_knows_commands_options_and_paths(tmp_path: Path) -> None:
    """bash completes by the script that is printed; zsh and fish have scripts, too."""
    code, script, err = run("completion bash")
    assert (code, err) == (0, "")
    (tmp_path / "script").write_text(script)
    (tmp_path / "checkpoint").mkdir()
    asks = [("shardwise", "conv"), ("shardwise", "diff", "--rename-"), ("shardwise", "inspect", "check")]
    asks += [("shardwise", "convert", "--to", "safe")]
    for words, wanted in zip(asks, ("convert", "--rename-a", "checkpoint", "safetensors"), strict=True):
        line = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; COMPREPLY=(); _shtab_shardwise"
        call = ["bash", "-c", f'source ./script; {line}; echo "${{COMPREPLY[@]}}"']
        found = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, check=True)
        assert wanted in found.stdout.split()
    for shell in ("zsh", "fish"):
        code, script, err = run(f"completion {shell}")
        assert (code, err, "reshard" in script, "mesh" in script) == (0, "", True, True)


def test_completion_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the library that generates the scripts is missing."""
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert capsys.readouterr().err == "shardwise: completion needs shtab: pip install 'shardwise[cli]'\n"


def test_the_version_does_not_import_torch() -> None:
    """Nor anything else of the package."""
    code, out, err = run("--version")
    assert (code, out.split()[0], err) == (0, "shardwise", "")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("frob", f"there is no command 'frob': there are {', '.join(COMMANDS)}, completion; see 'shardwise"),
        ("inspct a", "there is no command 'inspct': did you mean 'inspect'? See 'shardwise"),
        ("--versoin", "there is no option '--versoin': did you mean '--version'? See 'shardwise"),
        ("", "the following arguments are required: COMMAND; see 'shardwise"),
        ("inspect a --layuts", "there is no option '--layuts': did you mean '--layouts'? See 'shardwise inspect"),
        ("reshard a b --rnaks=2", "there is no option '--rnaks': did you mean '--ranks'? See 'shardwise reshard"),
        ("verify a --frobnicate", "there is no option '--frobnicate': there are --help, --json; see 'shardwise verify"),
        ("inspect a -x", "unrecognized arguments: -x; see 'shardwise"),
        (
            "convert a b --to safetensor",
            "argument --to: 'safetensor' is no format: did you mean 'safetensors'? See 'shardwise convert",
        ),
        ("completion bsh", "argument shell: 'bsh' is no shell: did you mean 'bash'? See 'shardwise completion"),
    ],
)
def test_usage_errors_do_not_import_torch(line: str, says: str) -> None:
    """They are one line, and suggest what was meant, even where an option that is missing would be the next error."""
    code, out, err = run(line)
    assert (code, out, err) == (2, "", f"shardwise: {says} --help'\n")


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


def test_a_reader_may_end_before_the_command() -> None:
    """As `head` does: the command ends without a traceback."""
    program = "import sys; from shardwise_command import main; sys.stdin.read(); sys.exit(main())"
    words = [sys.executable, "-c", program, "completion", "bash"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.close()
        process.stdin.close()  # from now on it goes on
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait() == 2
