"""How tensors lie on ranks: four local processes make sharded tensors, and this one draws them.

python examples/layouts.py           four gloo ranks on this machine
torchrun --nproc-per-node 4 examples/layouts.py
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import shardwise
from shardwise.testing import run_on_ranks

RANKS = 4


def specs() -> dict[str, tuple[shardwise.ShardingSpec, tuple[int, ...], torch.dtype]]:
    """Four ways to cut a tensor."""
    places = [f"rank:{rank}/cpu" for rank in range(RANKS)]
    uneven = [
        shardwise.ShardMetadata([0, 0], [700, 48], "rank:0/cpu"),
        shardwise.ShardMetadata([0, 48], [300, 80], "rank:1/cpu"),
        shardwise.ShardMetadata([300, 48], [400, 80], "rank:2/cpu"),
        shardwise.ShardMetadata([700, 0], [300, 96], "rank:3/cpu"),
        shardwise.ShardMetadata([700, 96], [300, 32], "rank:1/cpu"),
    ]
    return {
        "Chunks of rows": (shardwise.ChunkShardingSpec(0, places), (1000, 128), torch.float32),
        "A grid, with rows cut where we say": (
            shardwise.GridShardingSpec((0, 1), [places[:2], places[2:]], [(750, 250), None]),
            (1000, 128),
            torch.bfloat16,
        ),
        "Any boxes: uneven, two of them on rank 1": (
            shardwise.EnumerableShardingSpec(uneven),
            (1000, 128),
            torch.float32,
        ),
        "More chunks than rows, dealt out in turn": (shardwise.ChunkShardingSpec(0, places * 2), (6, 16), torch.int8),
    }


def build() -> list[str]:
    """On every rank: make the tensors, and say what is here of each."""
    return [repr(shardwise.zeros(spec, *size, dtype=dtype)) for spec, size, dtype in specs().values()]


def show(reports: list[list[str]]) -> None:
    """Draw each layout, then what each rank said of its tensor."""
    colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for number, (title, (spec, size, dtype)) in enumerate(specs().items()):
        picture = shardwise.draw(spec, size, dtype=dtype).text(colours=colours)
        print(f"\n{title}\n{type(spec).__name__}: {picture}")
        for rank, report in enumerate(reports):
            print(f"  rank {rank} holds {report[number].partition('here ')[2].removesuffix(')')}")


def move() -> bool:
    """On every rank: move a tensor from rows to the uneven boxes, and compare it with the plain one."""
    (rows, size, _), (boxes, _, _) = specs()["Chunks of rows"], specs()["Any boxes: uneven, two of them on rank 1"]
    plain = torch.arange(float(torch.Size(size).numel())).reshape(size)
    return torch.equal(shardwise.tensor.shard_tensor(plain, rows).redistribute(boxes).full_tensor(), plain)


def show_move() -> None:
    """What had to travel."""
    (rows, size, dtype), (boxes, _, _) = specs()["Chunks of rows"], specs()["Any boxes: uneven, two of them on rank 1"]
    plan = shardwise.make_plan(rows.layout(size), boxes.layout(size))
    print("\nFrom the chunks of rows to the uneven boxes")
    print(plan.explain(itemsize=dtype.itemsize))


def main() -> None:
    """Use the ranks that torchrun started, or start four here."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        show(run_on_ranks(RANKS, build))
        show_move()
        print("moved, and every value is in its place:", all(run_on_ranks(RANKS, move)))
        print(f"\n{RANKS} gloo ranks on this machine made {len(specs())} sharded tensors; torch {torch.__version__}.")
        return
    dist.init_process_group("gloo")
    reports: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(reports, build())
    right = move()
    if dist.get_rank() == 0:
        show(reports)
        show_move()
        print("moved, and every value is in its place:", right)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
