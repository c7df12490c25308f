"""What `shardwise.estimate` predicts of a step, beside what the step takes: `python -m benchmarks.prediction`.

The devices are measured first. On gloo, four ranks of one thread each: `--devices devices.json` takes measured ones. On
NCCL (`--backend nccl`) the peaks are those of CUDA's allocator, also those of twelve larger set-ups; ranks share the
GPUs that there are. A machine that others use changes: with `--again`, the devices are measured before and after the
steps, and printed is what is predicted of both.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from benchmarks.set_ups import MODELS, Block, set_up_model
from benchmarks.set_ups import WAYS as SET_UPS
from shardwise.estimation.planning import Candidate
from shardwise.testing import run_on_ranks
from shardwise.tools.cli import main as command

RANKS, BLOCKS, WARM_UP = 4, 4, 4
STEPS = {"cpu": 8, "cuda": 40}
WAYS = ("fully sharded", "replicated", "tensor parallel")


def set_up(way: str, width: int, rows: int, device: str) -> Any:
    """A model that is sharded in some way, and a function that takes a step on so many rows a rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(*[Block(width) for _ in range(BLOCKS)])
        batch: Any = torch.ones(RANKS * rows, width)
    if way == "tensor parallel":
        shardwise.shard_module(model, {"*.up.*": 0, "*.down.weight": 1})
    else:
        candidate = Candidate(way, 1, (rows,) * RANKS, None)
        candidate.apply(model)
        batch = candidate.cut(batch)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measured(way: str, width: int, rows: int, device: str) -> tuple[float, float, int]:
    """Seconds of a step, those until the host has queued it, and the most bytes of CUDA's allocator."""
    step = set_up(way, width, rows, device)
    for _ in range(WARM_UP):
        step()
    seconds, queued = [], []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS[device]):
        dist.barrier()
        begun = time.perf_counter()
        step()
        queued.append(time.perf_counter() - begun)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return statistics.median(seconds), statistics.median(queued), peak


def measured_peaks() -> dict[tuple[str, str], int]:
    """The most bytes of CUDA's allocator in a step of each set-up, on this rank."""
    found = {}
    for model in MODELS:
        for way in SET_UPS:
            step = set_up_model(model, way, "cuda")
            step()
            step()
            torch.cuda.reset_peak_memory_stats()
            step()
            found[model, way] = torch.cuda.max_memory_allocated()
            del step
            gc.collect()
    return found


def compare_peaks(path: str) -> None:
    """Print the peaks of twelve set-ups, beside what is predicted."""
    print(f"\n{'model':10}{'way':28}{'peak':>14}{'predicted':>14}{'off by':>9}")
    peaks = run_on_ranks(RANKS, measured_peaks, backend="nccl", timeout=600, fresh=True)
    for model, way in peaks[0]:
        peak = max(each[model, way] for each in peaks)
        needs = shardwise.estimate(set_up_model, model, way, "cpu", devices=path, ranks=RANKS)
        line = f"{model:10}{way:28}{peak / 2**20:10.1f} MiB{needs.peak / 2**20:10.1f} MiB"
        print(f"{line}{needs.peak / peak - 1:+9.1%}", flush=True)


def print_parts(needs: Any, queued: float) -> None:
    """Print what the slowest rank's predicted seconds consist of, and when the host had queued the step."""
    slowest = max(needs.parts, key=lambda part: part.seconds)
    parts = {"kernels": slowest.computing, "waiting": slowest.waiting, "host": slowest.queueing, "queued after": queued}
    print("  " + ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in parts.items()), flush=True)


def measure_devices(path: Path) -> str:
    """Measure the devices of all ranks, as a user does; gives the file."""
    command(["doctor", "--measure", str(path), "--ranks", str(RANKS)])
    return str(path)


def compare_again(steps: dict[tuple[str, int], float], options: argparse.Namespace, paths: list[str]) -> None:
    """Print how far predictions are off that are made of each measurement of the devices."""
    print(f"\n{'way':18}{'rows':>6}{'measured':>12}{'before':>9}{'after':>9}")
    for (way, rows), seconds in steps.items():
        given = way, options.width, rows, "cpu"
        found = [shardwise.estimate(set_up, *given, devices=path, ranks=RANKS).seconds for path in paths]
        print(f"{way:18}{rows:6}{seconds * 1e3:9.1f} ms" + "".join(f"{one / seconds - 1:+9.0%}" for one in found))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--devices", help="a file that `shardwise doctor --measure` wrote")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--parts", action="store_true", help="print also what the predicted times consist of")
    parser.add_argument("--again", action="store_true", help="measure the devices after the steps, too")
    parser.add_argument("--times", action="store_true", help="only the times of steps, no peaks of other set-ups")
    options = parser.parse_args()
    device = "cuda" if options.backend == "nccl" else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        path = options.devices or measure_devices(Path(folder) / "devices.json")
        steps: dict[tuple[str, int], float] = {}
        print(f"{'way':18}{'rows':>6}{'measured':>12}{'predicted':>12}{'off by':>9}", end="")
        print(f"{'peak':>14}{'predicted':>14}{'off by':>9}")
        for way in WAYS:
            for rows in (64, 512):
                given = way, options.width, rows, device
                needs = shardwise.estimate(set_up, *given[:3], "cpu", devices=path, ranks=RANKS)
                found = run_on_ranks(RANKS, measured, *given, backend=options.backend, timeout=600, fresh=True)
                seconds, queued, peak = (max(each) for each in zip(*found, strict=True))
                steps[way, rows] = seconds
                line = f"{way:18}{rows:6}{seconds * 1e3:9.1f} ms{needs.seconds * 1e3:9.1f} ms"
                line += f"{needs.seconds / seconds - 1:+9.0%}"
                if peak:
                    line += f"{peak / 2**20:10.1f} MiB{needs.peak / 2**20:10.1f} MiB{needs.peak / peak - 1:+9.1%}"
                print(line, flush=True)
                if options.parts:
                    print_parts(needs, queued)
        if options.again:
            compare_again(steps, options, [path, measure_devices(Path(folder) / "again.json")])
        if device == "cuda" and not options.times:
            compare_peaks(path)


if __name__ == "__main__":
    from benchmarks import prediction  # as the ranks import it

    prediction.main()
