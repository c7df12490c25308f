"""Draws the pictures of the documentation into this folder: python docs/pictures/make.py"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from shardwise import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    ShardingPlan,
    ShardingSpec,
    ShardMetadata,
    draw,
    make_plan,
    shard_module,
)
from shardwise.layout.pictures import Picture
from shardwise.nn.sharding_plan.plan import Sharder
from shardwise.testing import run_on_ranks

HERE = Path(__file__).parent
RANKS = 4


def places(*ranks: int) -> list[str]:
    """Placements on these ranks."""
    return [f"rank:{rank}/cpu" for rank in ranks]


def pictures() -> dict[str, Picture]:
    """Those that one process draws alone, by the name of their file."""
    rows, columns = (ChunkShardingSpec(dim, places(*range(RANKS))) for dim in (0, 1))
    any_boxes = EnumerableShardingSpec(
        [
            ShardMetadata([0, 0], [700, 48], "rank:0/cpu"),
            ShardMetadata([0, 48], [300, 80], "rank:1/cpu"),
            ShardMetadata([300, 48], [400, 80], "rank:2/cpu"),
            ShardMetadata([700, 0], [300, 96], "rank:3/cpu"),
            ShardMetadata([700, 96], [300, 32], "rank:1/cpu"),
        ]
    )
    cube = GridShardingSpec((0, 1, 2), [[places(0, 1), places(2, 3)], [places(4, 5), places(6, 7)]])
    thousand = GridShardingSpec((0, 1), [places(*range(32 * row, 32 * row + 32)) for row in range(32)])
    size, dtype = (1000, 128), torch.float32
    return {
        "any-boxes.svg": draw(any_boxes, size, dtype=dtype),
        "slices.svg": draw(cube, (4, 6, 8), dtype=dtype),
        "thousand-ranks.svg": draw(thousand, (4096, 4096), dtype=torch.bfloat16),
        "rows-to-columns.svg": draw(make_plan(rows.layout(size), columns.layout(size)), dtype=dtype),
        "rows-to-any-boxes.svg": draw(make_plan(rows.layout(size), any_boxes.layout(size)), dtype=dtype),
    }


class Block(nn.Module):
    """The projections of a transformer's layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.o_proj = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)


class Transformer(nn.Module):
    """What a transformer holds, on the meta device: the picture needs no values."""

    def __init__(self, width: int = 128, layers: int = 6, words: int = 8000) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)


def model() -> Picture:
    """What each rank holds of a tensor-parallel transformer. Every rank calls it."""
    rows, columns = (ChunkShardingSpec(dim, places(*range(RANKS))) for dim in (0, 1))
    with torch.device("meta"):
        module = Transformer()
    plan: dict[str, ShardingSpec | Sharder] = {
        "embed.weight": rows,
        "**.[qkv]_proj.weight": rows,
        "**.up.*": rows,
        "**.o_proj.weight": columns,
        "**.down.weight": columns,
        "head.weight": rows,
    }
    return draw(shard_module(module, ShardingPlan(plan)))


def model_svg() -> str:
    """The same as SVG, which can travel between processes."""
    return model().svg()


def main() -> None:
    """Write all of them."""
    for name, picture in pictures().items():
        picture.save(HERE / name)
    (HERE / "model.svg").write_text(run_on_ranks(RANKS, model_svg)[0] + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
