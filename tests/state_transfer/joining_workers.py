"""What the two torchruns of a test start: trainers, of which one leaves, and a newcomer.

joining_workers.py KIND PORT OUT       with a store at that port; the losses are written to OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist
from tests.state_transfer.short_training import train, training

import shardwise
from shardwise import ChunkShardingSpec


def main(kind: str, port: str, out: str) -> None:
    """Two trainers, then one, then one and the newcomer."""
    old, losses = None, list[float]()
    if kind == "trainers":
        dist.init_process_group("gloo")  # as torchrun says
        rank = dist.get_rank()
        full = training({"0.weight": 0, "2.weight": 1})
        losses = train(full, 2)
        alone = dist.new_group([1])
        places = ChunkShardingSpec(0, ["rank:1/cpu"])
        old = training({"0.weight": places, "2.weight": places}, alone) if rank == 1 else None
        shardwise.resize(full, old)
        if old is not None:
            losses += train(old, 2)
        dist.destroy_process_group()
        if old is None:
            return  # torchrun does not mind a worker that is done
    store = dist.PrefixStore("both", dist.TCPStore("127.0.0.1", int(port), is_master=False))
    dist.init_process_group("gloo", store=store, rank=int(kind == "trainers"), world_size=2)
    new = training({"0.weight": 1, "0.bias": 0, "2.weight": 0}, seed=1)
    shardwise.resize(old, new)
    losses += train(new, 2)
    dist.destroy_process_group()
    Path(out).write_text(" ".join(map(repr, losses)))


if __name__ == "__main__":
    main(*sys.argv[1:])
