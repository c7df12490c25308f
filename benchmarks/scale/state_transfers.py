"""Planning how a state of 1,000 tensors goes from 4,096 ranks to 1,024 others.

`python -m benchmarks.scale.state_transfers`. As one rank does it: one that trains, whose tensors are rows as FSDP cuts
them; and one that serves, by tensor parallelism of 8 in 128 replicas, with q, k, v and gate, up fused.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import torch

from shardwise.layout import Axis, Cut, Layout, Places
from shardwise.state_transfer import cat, interleave
from shardwise.state_transfer.explaining import explained
from shardwise.state_transfer.planning import Options, _peers, _planned, loaded
from shardwise.state_transfer.sides import Given, joined, words_of

TRAIN, SERVE, WAYS, LAYERS, WIDTH = 4_096, 1_024, 8, 125, 8_192
CPU = ((torch.device("cpu"), None),)
TRAINED = {
    "q": (WIDTH, WIDTH),
    "k": (1_024, WIDTH),
    "v": (1_024, WIDTH),
    "o": (WIDTH, WIDTH),
    "gate": (28_672, WIDTH),
    "up": (28_672, WIDTH),
    "down": (WIDTH, 28_672),
    "norm": (WIDTH,),
}
SERVED = {
    "qkv": (10_240, WIDTH),
    "o": (WIDTH, WIDTH),
    "gate_up": (57_344, WIDTH),
    "down": (WIDTH, 28_672),
    "norm": (WIDTH,),
}
RECIPE = {"*.qkv": interleave("*.q", "*.k", "*.v", groups=WAYS), "*.gate_up": cat("*.gate", "*.up")}


def states() -> tuple[dict[str, Given], dict[str, Given]]:
    """Both sides, as layouts."""
    trainers = Places(np.arange(TRAIN), CPU)
    servers = Places(np.arange(TRAIN, TRAIN + SERVE), CPU)

    def rows(size: torch.Size) -> Layout:
        return Layout.by_rule(size, [Axis(TRAIN, 0, Cut.in_steps(size[0], TRAIN, 0, -(-size[0] // TRAIN)))], trainers)

    def parallel(name: str, size: torch.Size) -> Layout:
        if name == "norm":
            return Layout.whole(size, servers)
        dim = int(name in ("o", "down"))
        cut = Cut.in_steps(size[dim], WAYS, 0, size[dim] // WAYS)
        return Layout.by_rule(size, [Axis(SERVE // WAYS), Axis(WAYS, dim, cut)], servers)

    source, target = dict[str, Given](), dict[str, Given]()
    for layer in range(LAYERS):
        for name, numbers in TRAINED.items():
            size = torch.Size(numbers)
            source[f"{layer}.{name}"] = Given(size, torch.float32, rows(size))
        for name, numbers in SERVED.items():
            size = torch.Size(numbers)
            target[f"{layer}.{name}"] = Given(size, torch.bfloat16, parallel(name, size))
    return source, target


def plan(here: int) -> None:
    """Everything that a rank does alone, between the meetings; what it took is printed."""
    source, target = states()
    ranks = [list(range(TRAIN)), list(range(TRAIN, TRAIN + SERVE))]
    begin = time.perf_counter()
    told = [json.loads(words_of(source, {})), json.loads(words_of({}, target))]
    problems: list[str] = []
    sides = [
        joined(which, [(some, 0, words[k]) for some, words in zip(ranks, told, strict=True)], TRAIN + SERVE, problems)
        for k, which in enumerate(("source", "target"))
    ]
    options = Options(None, RECIPE, 256 * 2**20, strict=True, staged=False, on_arrival=None)
    draft = _planned((source, target), sides[0], sides[1], options, None, frozenset({"cpu"}))
    digest, peers = draft.digest, _peers(draft.routes, here)
    planned = time.perf_counter()
    known = replace(draft, most_peers=TRAIN)
    whole = loaded(known, here, TRAIN + SERVE, options.max_bytes, torch.device("cpu"))
    dealt = time.perf_counter()
    explained(whole, range(TRAIN + SERVE), here, 1e10)
    done = time.perf_counter()
    assert not problems
    assert digest
    load = whole.load
    segments = [segment for one in load.rounds for _, segment in (*one.sends, *one.receives)]
    pieces, mean = len(load), sum(segment.nbytes for segment in segments) / len(segments) / 1024
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"  rank {here:>5,}: plan {planned - begin:5.2f} s, {pieces:>9,} pieces for {peers:>5,} ranks "
        f"{dealt - planned:6.2f} s, {len(load.rounds):>5,} rounds of segments of {mean:5.0f} KiB, "
        f"explain {done - dealt:5.2f} s, {memory:6.0f} MiB in all",
        flush=True,
    )


def main() -> None:
    """A process for each."""
    if len(sys.argv) > 1:
        plan(int(sys.argv[1]))
        return
    print(f"{len(TRAINED) * LAYERS:,} tensors from {TRAIN:,} ranks to {SERVE:,}, {len(SERVED) * LAYERS:,} there")
    for here in (0, TRAIN):
        subprocess.run([sys.executable, "-m", "benchmarks.scale.state_transfers", str(here)], check=True)


if __name__ == "__main__":
    main()
