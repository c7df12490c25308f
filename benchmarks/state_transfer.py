"""A whole model from four ranks that train to four that serve: `python -m benchmarks.state_transfer [--backend nccl]`.

Rows of each parameter, as FSDP cuts them, become columns or rows of tensor parallelism on other ranks. The plain
all-to-all has nothing to pack. shardwise packs while it sends, which takes time of its own where ranks share cores.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import shardwise
from benchmarks.gpu import gigabytes_per_second
from benchmarks.table import Row, show
from benchmarks.timing import best_together
from shardwise import ChunkShardingSpec, StateTransfer
from shardwise.state_transfer.planning import cores
from shardwise.testing import run_on_ranks

WORLD, TENSORS, MIB = 8, 300, 512
TRAIN, SERVE = range(4), range(4, 8)
REPEATS = 7


def sizes() -> list[tuple[int, int]]:
    """A model's: every third is a small one, the others make up the rest."""
    large = TENSORS - TENSORS // 3
    width = 512
    rows = MIB * 2**20 // 4 // width // large // 8 * 8
    return [(64, 16) if k % 3 == 2 else (rows, width) for k in range(TENSORS)]


def spec(dim: int, ranks: range, device: str) -> ChunkShardingSpec:
    places = [f"rank:{rank}/{device}" for rank in ranks]
    return ChunkShardingSpec(dim, places)


def move(backend: str = "gloo") -> tuple[list[Row], str]:
    """What every rank does; rank 0 reports."""
    device = "cpu" if backend == "gloo" else "cuda:0"
    names = [f"w{k}" for k in range(TENSORS)]
    model = dict(zip(names, sizes(), strict=True))
    training, serving = dist.get_rank() in TRAIN, dist.get_rank() in SERVE
    trained = {n: shardwise.ones(spec(0, TRAIN, device), *size) for n, size in model.items()}
    served = {n: shardwise.zeros(spec(k % 2, SERVE, device), *size) for k, (n, size) in enumerate(model.items())}
    transfer = StateTransfer(trained if training else None, served if serving else None)
    mesh = DeviceMesh(device.partition(":")[0], list(TRAIN))
    dtensors = (
        {n: DTensor.from_local(t.local_tensor(), mesh, [Shard(0)]) for n, t in trained.items()} if training else {}
    )
    everything = sum(a * b * 4 for a, b in model.values())
    share = everything // 16
    to = [share if training and rank in SERVE else 0 for rank in range(WORLD)]
    of = [share if serving and rank in TRAIN else 0 for rank in range(WORLD)]
    given, taken = (torch.zeros(sum(each), dtype=torch.uint8, device=device) for each in (to, of))

    def take(name: str, whole: torch.Tensor) -> None:
        dim = names.index(name) % 2
        served[name].local_tensor().copy_(whole.chunk(4, dim)[dist.get_rank() - SERVE[0]])

    def broadcast() -> None:
        """What most do: the whole of each parameter to everybody, who keeps its part."""
        for name, size in model.items():
            whole = dtensors[name].full_tensor() if training else torch.empty(size, device=device)
            dist.broadcast(whole, 0)
            if serving:
                take(name, whole)

    def gather() -> None:
        """The first half of it alone: no rank that serves has got anything yet."""
        for name in model if training else ():
            dtensors[name].full_tensor()

    def finished(work: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            work()
            if device != "cpu":
                torch.cuda.synchronize()

        return run

    contenders: dict[str, Callable[[], Any]] = {
        "shardwise": transfer.run,
        "plain": lambda: dist.all_to_all_single(taken, given, of, to),
        "broadcast": broadcast,
        "DTensor": gather,
    }
    seconds = best_together({name: finished(work) for name, work in contenders.items()}, repeats=REPEATS)
    assert all(bool((t.local_tensor() == 1).all()) for t in served.values() if serving)
    budget = "≤ 1.3 × plain, ≤ 1/5 × broadcast"
    row = Row(
        f"{TENSORS} tensors, {MIB} MiB, 4 → 4 ranks", seconds, budget, limits=(("plain", 1.3), ("broadcast", 0.2))
    )
    said = f"{transfer.explain().splitlines()[0]}\n  buffers: {transfer._rounds.buffered / 2**20:.1f} MiB a rank"
    said += f"\n  {WORLD} ranks on {cores()} cores"
    if device != "cpu":
        said += f"\n  a round is packed at {packing_rate(transfer):.1%} of the speed of a device copy (budget: 80 %)"
    return [row], said


def packing_rate(transfer: StateTransfer) -> float:
    """How fast the first round is packed, as a part of the speed of a device copy of as many bytes; rank 0 alone."""
    found = 0.0
    if dist.get_rank() == 0:
        copies = next(copies for copies, _ in transfer._rounds._prepared(0).sends if copies is not None)
        one, other = (torch.empty(copies.nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
        plain = gigabytes_per_second(lambda: other.copy_(one), copies.nbytes)
        found = gigabytes_per_second(copies.make, copies.nbytes) / plain
    dist.barrier()
    return found


def measure(backend: str = "gloo") -> list[Row]:
    """Print the table."""
    rows: list[Row]
    rows, said = run_on_ranks(WORLD, move, backend, timeout=550, fresh=True, backend=backend)[0]
    show(f"A state on its way, {backend} (plain: one raw all_to_all_single of as many bytes)", rows)
    print(f"\n  {said}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    measure(parser.parse_args().backend)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
