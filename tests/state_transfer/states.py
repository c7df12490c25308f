"""Random pairs of states: what each rank gives of both sides, and what the target must be, worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from tests.cases import places
from tests.comm.transfer.test_anywhere import specs
from tests.state_transfer.expressions import made, sizes_of_dims
from torch.distributed import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement as Placing

import shardwise
from shardwise import Layout, ReplicatedShardingSpec, ShardingSpec
from shardwise.interop.placements import layout_on_mesh, mesh_places
from shardwise.state_transfer import Expression, take
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.shard import narrow_tensor

WORLD = 4
MESHES = {"row": [0, 1, 2, 3], "square": [[0, 1], [2, 3]], "two": [1, 3]}
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FAMILIES = {  # dtypes of sources, and of targets that these can become
    "float": ([*FLOATS, torch.int64], FLOATS),
    "int": ([torch.int64, torch.int32, torch.uint8], [torch.int64, torch.int32, torch.uint8, torch.int8]),
    "complex": ([torch.complex128, torch.complex64, torch.float32], [torch.complex128, torch.complex64]),
}
GIVEN = ("tensor", "layout", "nothing")  # by a rank that has no box of it


class OnMesh(NamedTuple):
    """How a DTensor lies."""

    mesh: str
    placings: tuple[Placing, ...]


@dataclass(frozen=True)
class Held:
    """A tensor of one side: of which kind, and on which ranks."""

    size: tuple[int, ...]
    dtype: torch.dtype
    how: ShardingSpec | tuple[int, ...] | OnMesh  # sharded, plain on these ranks, or a DTensor
    otherwise: str = "tensor"  # what ranks without any of it give
    bare: bool = False  # those that have some of it give the layout alone

    def layout(self, meshes: Mapping[str, DeviceMesh]) -> Layout:
        """Which boxes of it are where."""
        if isinstance(self.how, ShardingSpec):
            return self.how.layout(self.size)
        if isinstance(self.how, OnMesh):
            mesh = meshes[self.how.mesh]
            return layout_on_mesh(torch.Size(self.size), mesh, self.how.placings, mesh_places(mesh, "cpu"))
        return ReplicatedShardingSpec(places(*self.how)).layout(self.size)

    def given(self, plain: torch.Tensor, meshes: Mapping[str, DeviceMesh]) -> Any:
        """What this rank gives, with its part of a plain tensor; None for nothing."""
        if isinstance(self.how, ShardingSpec):
            layout, here = self.layout(meshes), dist.get_rank()
            made = shardwise.empty(self.how, *self.size, dtype=self.dtype)  # which every rank does
            for shard in made.local_shards():
                shard.tensor.copy_(narrow_tensor(plain, shard.metadata))
            if not layout.rows_on(here) and self.otherwise != "tensor":
                return layout if self.otherwise == "layout" else None
            return layout if self.bare else made
        plain = plain.clone()
        if isinstance(self.how, OnMesh):
            return distribute_tensor(plain, meshes[self.how.mesh], self.how.placings, src_data_rank=None)
        return plain if dist.get_rank() in self.how else None


@dataclass(frozen=True)
class Pair:
    """Two states and how one becomes the other."""

    sources: dict[str, Held]
    targets: dict[str, Held]
    recipe: dict[str, Expression]
    numbers: dict[str, torch.Tensor]  # of each target, the number of the source's element that it is; 0 for a zero
    options: dict[str, Any]

    def plain_sources(self, run: int) -> dict[str, torch.Tensor]:
        """Values that differ from run to run: some lose digits in narrower dtypes."""
        found, begin = {}, 1
        for name, held in self.sources.items():
            count = torch.Size(held.size).numel()
            values = torch.arange(begin, begin + count, dtype=torch.float64) * (1.37 if held.dtype in FLOATS else 1)
            found[name] = (values + run).reshape(held.size).to(held.dtype)
            begin += count
        return found

    def plain_targets(self, run: int) -> dict[str, torch.Tensor]:
        """What must arrive."""
        sources = self.plain_sources(run)
        found = {}
        for name, held in self.targets.items():
            zero = torch.zeros(1, dtype=held.dtype)
            used = self.recipe[name].sources
            flat = [(each if of in used else each * 0).reshape(-1) for of, each in sources.items()]
            every = torch.cat(
                [
                    zero,
                    *(
                        each.real.to(held.dtype)
                        if each.is_complex() and not held.dtype.is_complex
                        else each.to(held.dtype)
                        for each in flat
                    ),
                ]
            )
            found[name] = every[self.numbers[name].long()]
        return found

    def bound(self, rank: int, meshes: Mapping[str, DeviceMesh]) -> int:
        """Bytes that a rank must get: of each target what it wants and does not have, in the narrower dtype."""
        width, holds = [torch.zeros(1, dtype=torch.int64)], [torch.ones(1, dtype=torch.bool)]
        for held in self.sources.values():
            mask = covered(held.layout(meshes), rank)
            holds.append(mask.reshape(-1))
            width.append(torch.full((mask.numel(),), held.dtype.itemsize))
        missing, widths, total = ~torch.cat(holds), torch.cat(width), 0
        for name, held in self.targets.items():
            numbers = self.numbers[name].long()[covered(held.layout(meshes), rank)]
            narrow = widths if held.bare else widths.clamp(max=held.dtype.itemsize)
            total += int((missing[numbers] * narrow[numbers]).sum())
        return total


def covered(layout: Layout, rank: int) -> torch.Tensor:
    """Which elements of a tensor a rank has."""
    found = torch.zeros(layout.size, dtype=torch.bool)
    for row in layout.rows_on(rank):
        found[layout.index(row)] = True
    return found


def local_boxes(given: Any) -> list[torch.Tensor]:
    """The local tensors of what a rank gave."""
    if given is None or isinstance(given, Layout):
        return []
    if isinstance(given, ShardedTensorBase):
        return [shard.tensor.detach() for shard in given.local_shards()]
    return [given.to_local() if hasattr(given, "to_local") else given]


def expected_boxes(plain: torch.Tensor, layout: Layout, rank: int) -> Iterator[torch.Tensor]:
    """A rank's boxes of a plain tensor."""
    return (plain[layout.index(row)] for row in layout.rows_on(rank))


@st.composite
def helds(draw: st.DrawFn, size: tuple[int, ...], ranks: Sequence[int], dtypes: Sequence[torch.dtype]) -> Held:
    """A tensor of this size, on some of these ranks."""
    dtype = draw(st.sampled_from(dtypes))
    kind = draw(st.sampled_from(["spec", "spec", "spec", "plain", "dtensor"]))
    if kind == "dtensor" and len(ranks) == WORLD and 0 not in size:
        mesh = draw(st.sampled_from(list(MESHES)))
        placing = st.sampled_from([Replicate(), *(Shard(dim) for dim in range(len(size)))])
        return Held(size, dtype, OnMesh(mesh, tuple(draw(placing) for _ in range(2 if mesh == "square" else 1))))
    if kind == "plain" or not size:
        return Held(size, dtype, tuple(draw(st.lists(st.sampled_from(ranks), min_size=1, unique=True))))
    return Held(size, dtype, draw(specs(size, ranks)), draw(st.sampled_from(GIVEN)))


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    """Up to four targets of up to nine sources, on one to four ranks each."""
    some = st.lists(st.integers(0, WORLD - 1), min_size=1, max_size=WORLD, unique=True)
    before, after = draw(some), draw(some)
    given, wanted = FAMILIES[draw(st.sampled_from(list(FAMILIES)))]
    numbers: dict[str, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    recipe: dict[str, Expression] = {}
    targets: dict[str, Held] = {}
    for k in range(draw(st.integers(1, 4))):
        size = tuple(draw(st.lists(sizes_of_dims, max_size=3)))
        expression, numbers[f"t{k}"] = made(draw, size, draw(st.integers(0, 3)), state)
        recipe[f"t{k}"] = take(expression) if isinstance(expression, str) else expression
        target = draw(helds(size, after, wanted))
        bare = isinstance(target.how, ShardingSpec) and draw(st.integers(0, 4)) == 0
        targets[f"t{k}"] = Held(target.size, target.dtype, target.how, target.otherwise, bare)
    sources = {name: draw(helds(tuple(tensor.shape), before, given)) for name, tensor in state.items()}
    for name, target in targets.items():
        if target.bare:  # of a dtype that can hold all that is sent
            named = [sources[source].dtype for source in recipe[name].sources]
            dtype = reduce(torch.promote_types, named)
            targets[name] = Held(target.size, dtype, target.how, target.otherwise, bare=True)
    options = {"max_bytes": draw(st.sampled_from([1, 2**20])), "staged": draw(st.booleans())}
    return Pair(sources, targets, recipe, numbers, options)
