"""``shardwise doctor``: prints what is installed, and runs a self-test on a few local ranks, or measures devices."""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

import shardwise
from shardwise.layout.pictures.words import bytes_text
from shardwise.layout.specs import ChunkShardingSpec
from shardwise.testing import RankFailure, run_on_ranks
from shardwise.tools.cli import measure
from shardwise.tools.cli.console import Column, Console, names, numbers

PACKAGES = ("shardwise", "torch", "numpy", "safetensors", "xxhash")
EXTRAS = ("rich", "shtab", "fsspec", "s3fs", "gcsfs", "transformers", "accelerate", "peft")
SELF_TEST_RANKS = 2
FEW_FILES = 1024  # a checkpoint of many ranks needs hundreds
LITTLE = 64 * 2**20  # bytes of shared memory; data loaders and NCCL need more


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command."""
    found = {"versions": _versions(), "backends": _backends(), "devices": _devices(), "limits": _limits()}
    _print_environment(found, console)
    if options.measure is not None:
        measured = measure.run(options, console)
        console.give({**found, "measured": measured, "ok": measured["ok"]})
        return int(not measured["ok"])
    tests: list[dict[str, Any]] = []
    ranks = SELF_TEST_RANKS if options.ranks is None else options.ranks
    if ranks > 0:
        console.line()
        console.line(f"self-test on {ranks} local ranks (gloo)", "bold")
        tests = _self_test(ranks)
        rows = [[test["test"], "ok" if test["ok"] else "FAILED", f"{test['seconds']:.2f} s"] for test in tests]
        console.table([names("test"), Column("result"), numbers("time")], rows)
    failed = [test for test in tests if not test["ok"]]
    for test in failed:
        console.line(f"{test['test']}: {test['error']}", "red")
    console.give({**found, "tests": tests, "ok": not failed})
    if tests:
        console.line("all is well" if not failed else f"{len(failed)} failed", "red" if failed else "green")
    return int(bool(failed))


def _versions() -> dict[str, str | None]:
    known: dict[str, str | None] = {"python": f"{platform.python_version()} ({sys.platform}, {platform.machine()})"}
    for name in (*PACKAGES, *EXTRAS):
        try:
            known[name] = version(name)
        except PackageNotFoundError:
            known[name] = shardwise.__version__ if name == "shardwise" else None
    known["torch"] = torch.__version__
    return known


def _backends() -> dict[str, bool]:
    if not dist.is_available():
        return {}
    asked = {"gloo": "is_gloo_available", "nccl": "is_nccl_available", "mpi": "is_mpi_available"}
    return {name: bool(getattr(dist, function)()) for name, function in asked.items()}


def _devices() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"device": "cpu", "name": f"{os.cpu_count()} cores", "memory": _memory()}]
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(number)
            found.append({"device": f"cuda:{number}", "name": about.name, "memory": about.total_memory})
    return found


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _limits() -> dict[str, Any]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "open_files": soft,
        "open_files_most": hard,
        "shared_memory": None if shared is None else shared.total,
        "shared_memory_free": None if shared is None else shared.free,
        "temporary_free": shutil.disk_usage(tempfile.gettempdir()).free,
    }


def _print_environment(found: dict[str, Any], console: Console) -> None:
    if console.as_json:
        return
    versions, limits = found["versions"], found["limits"]
    facts = [("python", str(versions["python"]))]
    facts += [(name, str(versions[name] or "missing")) for name in PACKAGES]
    here = [f"{name} {versions[name]}" for name in EXTRAS if versions[name]]
    gone = [name for name in EXTRAS if not versions[name]]
    facts += [("extras", ", ".join(here) + (f" (not here: {', '.join(gone)})" if gone else ""))]
    backends = [name if there else f"no {name}" for name, there in found["backends"].items()]
    facts += [("backends", ", ".join(backends) or "torch has no distributed package")]
    for device in found["devices"]:
        memory = "" if device["memory"] is None else f", {bytes_text(device['memory'])}"
        facts.append((device["device"], f"{device['name']}{memory}"))
    few = " (few: raise it by ulimit -n)" if limits["open_files"] < FEW_FILES else ""
    facts.append(("open files", f"{limits['open_files']:,} of at most {limits['open_files_most']:,}{few}"))
    if limits["shared_memory"] is not None:
        little = " (little: a container's --shm-size)" if limits["shared_memory"] < LITTLE * 2 else ""
        free = bytes_text(limits["shared_memory_free"])
        facts.append(("shared memory", f"{free} free of {bytes_text(limits['shared_memory'])}{little}"))
    console.facts(facts)


# The self-test ------------------------------------------------------------------------------------------------------


def _self_test(ranks: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        tests: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
            "start ranks": (_test_start, ()),
            "shard and gather": (_test_shard, ()),
            "redistribute": (_test_redistribute, ()),
            "matmul and its gradient": (_test_matmul, ()),
            "save and load": (_test_save, (os.path.join(folder, "checkpoint"),)),
        }
        results = []
        for name, (test, args) in tests.items():
            begun, error = time.monotonic(), ""
            try:
                run_on_ranks(ranks, test, *args)
            except (RankFailure, RuntimeError, OSError) as failure:
                error = str(failure).strip()
            result = {"test": name, "ok": not error, "seconds": time.monotonic() - begun, "error": error}
            results.append(result)
            if name == "start ranks" and error:  # nothing else can work
                break
    return results


def _test_start() -> None:
    number = torch.ones(1)
    dist.all_reduce(number)
    _require(torch.equal(number, torch.full((1,), float(dist.get_world_size()))), "an all-reduce gave a wrong sum")


def _plain() -> torch.Tensor:
    return torch.arange(60, dtype=torch.float64).reshape(10, 6) / 7


def _chunks(dim: int) -> ChunkShardingSpec:
    """Chunks on the CPU, even with a GPU, for the self-test uses gloo."""
    return ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in range(dist.get_world_size())])


def _test_shard() -> None:
    whole = shardwise.shard(_plain(), _chunks(0)).full_tensor()
    _require(torch.equal(whole, _plain()), "rows put together again are not the tensor")


def _test_redistribute() -> None:
    moved = shardwise.shard(_plain(), _chunks(0)).redistribute(_chunks(1))
    _require(torch.equal(moved.full_tensor(), _plain()), "columns made of rows are not the tensor")


def _test_matmul() -> None:
    plain = _plain().requires_grad_()
    sharded = shardwise.shard(_plain(), _chunks(0)).requires_grad_()
    other = _plain().T.contiguous()
    torch.autograd.backward((plain @ other).sin().sum())
    torch.autograd.backward((sharded @ other).sin().sum())
    assert plain.grad is not None
    grad: Any = sharded.grad
    _require(torch.allclose(grad.full_tensor(), plain.grad), "a gradient is not that of the plain tensor")


def _test_save(path: str) -> None:
    shardwise.save({"x": shardwise.shard(_plain(), _chunks(0)), "step": 3}, path)
    state = shardwise.load({"x": shardwise.zeros(_chunks(1), 10, 6, dtype=torch.float64), "step": 0}, path)
    _require(
        torch.equal(state["x"].full_tensor(), _plain()) and state["step"] == 3, "what was loaded is not what was saved"
    )


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise RuntimeError(otherwise)
