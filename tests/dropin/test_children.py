"""Processes that are started from one with the drop-in have it too, however they are started."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import shardwise
from shardwise.dropin import corrections, modules
from shardwise.dropin.children import STARTUP

HOME = str(Path(shardwise.__file__).resolve().parents[1])  # the children use the shardwise that is tested

# A program that knows nothing of shardwise, imports the old system through torch, and starts other processes.
SCRIPT = """
import os, subprocess, sys
import torch.distributed._state_dict_utils as user
from torch.distributed._shard.sharded_tensor import ShardedTensor
import multiprocessing

def tell(who):
    assert user.ShardedTensor is ShardedTensor
    assert user._all_gather_sharded_tensor.__module__ == "shardwise.dropin.corrections"
    os.write(1, f"{who} {ShardedTensor.__module__}\\n".encode())  # at once: others print too

if __name__ == "__main__":
    tell(f"main {sys.argv[1:]} {os.environ.get('RANK')}")
    if "start" in sys.argv:
        import torch.multiprocessing
        torch.multiprocessing.spawn(tell, nprocs=1)
        process = multiprocessing.get_context("forkserver").Process(target=tell, args=("forkserver",))
        process.start()
        process.join()
        assert process.exitcode == 0
"""


def run(arguments: list[str], folder: Path, *path: str) -> str:
    """Start a Python in this folder, in which the program lies, with this path; give what it printed."""
    (folder / "program.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_spawn_and_forkserver(tmp_path: Path) -> None:
    """Processes of multiprocessing that import the program again; its arguments are its own."""
    printed = run(["-m", "shardwise.dropin", "program.py", "start", "-m"], tmp_path, HOME)
    ours = "shardwise.tensor.tensor"
    wanted = [f"main ['start', '-m'] None {ours}", f"0 {ours}", f"forkserver {ours}"]
    assert printed.splitlines() == wanted


def test_workers_of_torchrun_beside_another_sitecustomize(tmp_path: Path) -> None:
    """The workers have it, and the sitecustomize that was there before is run in every process, once."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('x')")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "program.py"]
    printed = run(["-m", "shardwise.dropin", *launcher], tmp_path, HOME, str(other))
    ours = "shardwise.tensor.tensor"
    assert sorted(printed.splitlines()) == [f"main [] 0 {ours}", f"main [] 1 {ours}"]
    assert (tmp_path / "ran").read_text() == "xxx"


def test_a_python_that_does_not_import_the_old_system_imports_nothing(tmp_path: Path) -> None:
    """And its path is as it would be."""
    code = "import sys; print([m for m in ('torch', 'shardwise', 'numpy') if m in sys.modules], sys.path)"
    assert run(["-c", code], tmp_path, STARTUP, HOME) == run(["-c", code], tmp_path, HOME)


def test_what_is_amended_is_known_there() -> None:
    """The file that children run imports nothing of shardwise, and so has names of its own."""
    startup = runpy.run_path(str(Path(STARTUP) / "sitecustomize.py"))
    assert startup["ROOT"] == modules.ROOT
    assert set(startup["AMENDED"]) == {module for module, _, _ in corrections.REPLACED}


def test_where_shardwise_cannot_be_imported_the_error_says_why_and_what_to_do(tmp_path: Path) -> None:
    """For a child that is another Python, or has another path."""
    (tmp_path / "shardwise.py").write_text("")
    (tmp_path / "torch" / "distributed").mkdir(parents=True)
    code = "try:\n    import torch.distributed._shard\nexcept ImportError as error:\n    print(error)"
    for folder in ("torch", "torch/distributed"):
        (tmp_path / folder / "__init__.py").write_text("")
    printed = run(["-c", code], tmp_path, STARTUP)
    assert "shardwise could not take the place of torch.distributed._shard" in printed
    assert f"Take {STARTUP} out of PYTHONPATH" in printed
