"""Layouts without a rule: many tables of an embedding model, each of few boxes, and one table of many boxes.

As TorchRec plans them, a table is whole on one rank, or cut into a few uneven parts along its rows or columns.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

import shardwise
from benchmarks.boxes import contenders
from benchmarks.scale.cases import Case
from benchmarks.scale.checkpoints import CHECKPOINT, index_of
from benchmarks.scale.world import RANK, World
from benchmarks.timing import Work
from shardwise import EnumerableShardingSpec, ShardingPlan, ShardMetadata
from shardwise.checkpoint.archive.index_file import parse_index
from shardwise.checkpoint.draft import draft_file
from shardwise.checkpoint.write_assignment import Source

RANKS = 1_024
WIDTH = 64
SMALLEST, LARGEST = 64, 4_096  # rows of a table
MOST_BOXES = 8
MANY_BOXES = 4  # of the one table, for each of the others
MODULES = 32  # more than are sharded


class Tables:
    """So many tables over 1,024 ranks: the records of each, and its size. The same for the same seed."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.count = count
        self.world = World(RANKS, grids=False)
        self._draw = random.Random(seed)
        self.sizes = [(self._draw.randint(SMALLEST, LARGEST), WIDTH) for _ in range(count)]
        self.records = [self._records(size) for size in self.sizes]

    def _records(self, size: tuple[int, int]) -> list[ShardMetadata]:
        """Table-wise, row-wise or column-wise, in turn by chance."""
        dim = self._draw.choice((None, 0, 1))
        parts = 1 if dim is None else self._draw.randint(2, MOST_BOXES)
        dim = dim or 0
        edges = [0, *sorted(self._draw.sample(range(1, size[dim]), parts - 1)), size[dim]]
        records = []
        for low, high, rank in zip(edges, edges[1:], self._draw.sample(range(RANKS), parts), strict=False):
            offsets, sizes = [0, 0], list(size)
            offsets[dim], sizes[dim] = low, high - low
            records.append(ShardMetadata(offsets, sizes, f"rank:{rank}/cpu"))
        return records

    def __str__(self) -> str:
        return f"{self.count:,} tables over {RANKS:,} ranks"

    @property
    def boxes(self) -> int:
        return sum(map(len, self.records))

    @property
    def many(self) -> int:
        """Boxes of the one table that has many."""
        return math.isqrt(MANY_BOXES * self.count) ** 2

    @cached_property
    def specs(self) -> list[EnumerableShardingSpec]:
        return [EnumerableShardingSpec(records) for records in self.records]

    def modules(self) -> list[nn.Module]:
        """One for each time that this is timed. To shard a parameter is to replace it, so that they can share them."""
        parameters = {
            f"table{number}": nn.Parameter(torch.empty(size, device="meta")) for number, size in enumerate(self.sizes)
        }
        made = [nn.Module() for _ in range(MODULES)]
        for module in made:
            for name, parameter in parameters.items():
                module.register_parameter(name, parameter)
        return made


def make_specs(tables: Tables, factor: int) -> Work:
    records = Tables(tables.count, factor).records
    return lambda: [EnumerableShardingSpec(of_one) for of_one in records]


def make_layouts(tables: Tables, factor: int) -> Work:
    other = Tables(tables.count, factor)
    pairs = list(zip(other.specs, other.sizes, strict=True))
    return lambda: [spec.layout(size) for spec, size in pairs]


def zeros(tables: Tables, factor: int) -> Work:
    other = Tables(tables.count, factor)
    pairs = list(zip(other.specs, other.sizes, strict=True))
    return lambda: [shardwise.zeros(spec, *size) for spec, size in pairs]


def shard_module(tables: Tables, factor: int) -> Work:
    other = Tables(tables.count, factor)
    modules = other.modules()
    plan = ShardingPlan({f"table{number}": spec for number, spec in enumerate(other.specs)})
    return lambda: shardwise.shard_module(modules.pop(), plan)


def sources_of(tables: Tables, seed: int) -> list[Source]:
    other = Tables(tables.count, seed)
    return [
        Source(f"table{number}", torch.float32, torch.Size(size), spec.layout(size))
        for number, (spec, size) in enumerate(zip(other.specs, other.sizes, strict=True))
    ]


def drafting(tables: Tables, factor: int) -> Work:
    sources = sources_of(tables, factor)
    return lambda: draft_file(CHECKPOINT, sources, list(range(RANKS)), RANK)


def indexing(tables: Tables, factor: int) -> Work:
    sources = sources_of(tables, factor)
    return lambda: index_of(sources, list(range(RANKS)))


def parsing(tables: Tables, factor: int) -> Work:
    text = index_of(sources_of(tables, factor), list(range(RANKS)))
    return lambda: parse_index(text, "here")


# One table of many boxes ----------------------------------------------------------------------------------------------


def many_boxes(tables: Tables, factor: int, *, who: str) -> Work:
    return contenders(tables.many, 10 + factor)[who]


def sharded(tables: Tables, factor: int, width: int) -> tuple[Any, Sequence[int]]:
    """A square of so many boxes, dealt out to all ranks."""
    side = math.isqrt(tables.many)
    step = width + factor
    places = tables.world.places
    records = [
        ShardMetadata([step * (k // side), step * (k % side)], [step, step], places[k % RANKS]) for k in range(side**2)
    ]
    return EnumerableShardingSpec(records), (side * step, side * step)


def one_zeros(tables: Tables, factor: int) -> Work:
    spec, size = sharded(tables, factor, 2)
    return lambda: shardwise.zeros(spec, *size)


def one_op(tables: Tables, factor: int) -> Work:
    spec, size = sharded(tables, factor, 8)
    tensor = shardwise.zeros(spec, *size)
    return lambda: tensor * 2


def one_redistribute(tables: Tables, factor: int) -> Work:
    spec, size = sharded(tables, factor, 14)
    tensor, rows = shardwise.zeros(spec, *size), tables.world.specs[0]
    return lambda: tensor.redistribute(rows)


OF_BOXES: dict[str, Any] = {"first": None, "each": "box, µs", "even": True, "count": lambda tables: tables.boxes / 1e3}
OF_MANY: dict[str, Any] = {**OF_BOXES, "count": lambda tables: tables.many / 1e3}

IRREGULAR: list[Case[Tables]] = [
    Case("tables: all specs", make_specs, later=False, **OF_BOXES),
    Case("tables: all layouts", make_layouts, later=False, **OF_BOXES),
    Case("tables: zeros of each", zeros, **OF_BOXES),
    Case("tables: shard_module", shard_module, **OF_BOXES),
    Case("tables: save: this rank's file", drafting, later=False, **OF_BOXES),
    Case("tables: save: the index, by the first rank", indexing, later=False, **OF_BOXES),
    Case("tables: load: parse the index", parsing, later=False, **OF_BOXES),
    Case("many boxes: spec, metadata", partial(many_boxes, who="shardwise"), later=False, **OF_MANY),
    Case("many boxes: spec, metadata by _shard", partial(many_boxes, who="_shard"), later=False, held=False, **OF_MANY),
    Case("many boxes: zeros", one_zeros, **OF_MANY),
    Case("many boxes: x * 2", one_op, **OF_MANY),
    Case("many boxes: redistribute to rows", one_redistribute, **OF_MANY),
]
