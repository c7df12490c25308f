"""Build and validate layouts of many boxes, and many layouts of few."""

from __future__ import annotations

import math
import random
import warnings
from collections import deque
from collections.abc import Sequence

import torch

import shardwise
from benchmarks.table import Row
from benchmarks.timing import Work, best_of

COUNTS = (2_500, 10_000, 40_000, 160_000)
SLOWEST_OF_THEIRS = 40_000  # the old system takes too long for more
HELD = 40_000  # the count that has a budget
SPECS = 1_000  # of few boxes each
EDGE = 1 << 20  # of a square that is cut at random

Boxes = list[tuple[list[int], list[int]]]  # offsets and sizes


def grid(count: int, edge: int = 10) -> Boxes:
    """A square of squares."""
    side = math.isqrt(count)
    return [([edge * (k // side), edge * (k % side)], [edge, edge]) for k in range(side**2)]


def rows(count: int) -> Boxes:
    """One behind the other."""
    return [([10 * k, 0], [10, 64]) for k in range(count)]


def irregular(count: int) -> Boxes:
    """A square, cut in two at random again and again, in no order."""
    draw = random.Random(0)
    pieces = deque([([0, 0], [EDGE, EDGE])])
    while len(pieces) < count:
        offsets, sizes = pieces.popleft()
        dim = sizes.index(max(sizes))
        at = draw.randint(sizes[dim] // 4, 3 * sizes[dim] // 4)
        below, above, middle = sizes.copy(), sizes.copy(), offsets.copy()
        below[dim], above[dim], middle[dim] = at, sizes[dim] - at, offsets[dim] + at
        pieces += [(offsets, below), (middle, above)]
    return draw.sample(list(pieces), count)


def building(boxes: Boxes, *, records: bool = False, specs: int = 1) -> dict[str, Work]:
    """So many specs of these boxes are made, and each is asked for a tensor's metadata; with the records or of them."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

    size = torch.Size([max(offsets[dim] + sizes[dim] for offsets, sizes in boxes) for dim in (0, 1)])
    said = [(*box, f"rank:{k % 8}/cpu") for k, box in enumerate(boxes)]
    old = (ShardMetadata, EnumerableShardingSpec, TensorProperties)
    new = (shardwise.ShardMetadata, shardwise.EnumerableShardingSpec, shardwise.layout.metadata.TensorProperties)

    def work(kinds: Sequence[type]) -> Work:
        record, spec, properties = kinds
        given = [record(*one) for one in said]

        def build() -> None:
            for _ in range(specs):
                shards = [record(*one) for one in said] if records else given
                spec(shards).build_metadata(size, properties())

        return build

    return {"shardwise": work(new), "_shard": work(old)}


def contenders(count: int, edge: int = 10) -> dict[str, Work]:
    """A square grid of boxes: records are there, the spec is made and asked for a tensor's metadata."""
    return building(grid(count, edge))


def build() -> list[Row]:
    warnings.simplefilter("ignore")
    table = []

    def measured(what: str, able: dict[str, Work], *, held: bool = False) -> None:
        limit = ("_shard", 0.25) if held else None
        table.append(Row(what, best_of(able, calls=1, repeats=3), "≤ 1/4 _shard" if limit else "", limit))

    for count in COUNTS:
        able = contenders(count)
        if count > SLOWEST_OF_THEIRS:
            del able["_shard"]
        measured(f"build + validate {count:,} boxes", able, held=count == HELD)
    measured(f"{HELD:,} boxes, and their records", building(grid(HELD), records=True), held=True)
    measured(f"{HELD:,} irregular boxes", building(irregular(HELD)), held=True)
    # Where all boxes lie behind each other the old system sorts them and copies no record: no budget, but no secret.
    measured(f"{HELD:,} boxes by rows", building(rows(HELD)))
    for few in (1, 2, 8):
        measured(f"{SPECS:,} specs of {few} boxes by rows", building(rows(few), specs=SPECS))
    return table
