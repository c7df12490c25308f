"""The rows: what is timed, each in a world that is given and for sizes that no other row has.

So that no row finds what another has worked out, each has a width of its own; and each can be prepared several times
over, for a factor that makes other sizes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardwise
from benchmarks.scale import checkpoints
from benchmarks.scale.block import training_step
from benchmarks.scale.world import RANK, World
from benchmarks.timing import Work

W = TypeVar("W")  # what a row is prepared in: a world, or tables over one

PARAMETERS = 24
MANY = 32  # modules to be sharded, one for each time that this is timed
INDEX_ROW = "save 1,000 tensors: size of the index (KiB)"
MEMORY_ROW = "memory above the start (MiB)"  # after all of them but those of DTensor
FIRST_OP = 20.0  # ms that the first call of an op may take


@dataclass(frozen=True)
class Case(Generic[W]):
    """A row: how it is prepared, which is not timed; of how many things it is made; and its budgets, if it has any.

    Later calls may take as long as in the smallest world.
    """

    work: str
    prepare: Callable[[W, int], Work]
    first: float | None = FIRST_OP  # the most ms that the first call may take
    later: bool = True  # whether later calls are timed too
    each: str = ""  # what it is made of, if it is also told for each of them
    count: Callable[[W], float] = lambda _: 1  # how many of them; the budget is for each
    even: bool = False  # whether the first call, too, may take as long as in the smallest world
    on_grids: bool = True  # whether it is another thing on grids
    held: bool = True  # whether it has budgets


# Making ---------------------------------------------------------------------------------------------------------------


def make_specs(world: World, factor: int) -> Work:
    return world.new_specs


def make_layout(world: World, factor: int) -> Work:
    spec = world.new_specs()[0]
    return lambda: spec.layout(world.narrow(factor, 3))


class Layers(nn.Module):
    """Weights of which no two have the same size: half for one spec, half for the other."""

    def __init__(self, world: World, factor: int) -> None:
        super().__init__()
        self.up, self.down = nn.ParameterList(), nn.ParameterList()
        for k in range(PARAMETERS // 2):
            size = world.wide(factor, 1 + k) if world.grids else (world.side * factor, 64 + k)
            self.up.append(nn.Parameter(torch.empty(size, device="meta")))
            self.down.append(nn.Parameter(torch.empty(size[::-1], device="meta")))


def plan_of(world: World) -> shardwise.ShardingPlan:
    first, second = world.specs
    return shardwise.ShardingPlan({"up.*": first, "down.*": second})


def shard_module(world: World, factor: int) -> Work:
    modules, plan = [Layers(world, factor) for _ in range(MANY)], plan_of(world)
    return lambda: shardwise.shard_module(modules.pop(), plan)


def zeros(world: World, factor: int) -> Work:
    spec = world.specs[0]
    return lambda: shardwise.zeros(spec, *world.narrow(factor, 5))


def replicas(world: World, factor: int) -> Work:
    spec = world.replicated
    return lambda: shardwise.zeros(spec, 8, 5 + factor)


# Moving ---------------------------------------------------------------------------------------------------------------


def plan(world: World, factor: int, *, width: int, half: bool = False, whole: bool = False) -> Work:
    source, target = world.specs
    size = world.wide(factor, width)
    layouts = source.layout(size), (world.half if half else target).layout(size)

    def own() -> object:
        """What this rank sends, and what it receives."""
        made = shardwise.make_plan(*layouts)
        return made.sends(RANK), made.receives(RANK)

    return (lambda: shardwise.make_plan(*layouts).moved) if whole else own


def redistribute(world: World, factor: int) -> Work:
    source, target = world.specs
    tensor = shardwise.zeros(source, *world.wide(factor, 1))
    return lambda: tensor.redistribute(target)


def to_half(world: World, factor: int) -> Work:
    source, target = world.specs[0], world.half
    tensor = shardwise.zeros(source, *world.narrow(factor, 13))
    return lambda: tensor.redistribute(target)


def to_replicas(world: World, factor: int) -> Work:
    tensor = shardwise.zeros(world.specs[0], *world.wide(factor, 1)) if world.grids else _tensor(world, factor, 2)
    spec = world.replicated
    return lambda: tensor.redistribute(spec)


def from_dtensor(world: World, factor: int) -> Work:
    """Replicated over one axis of a mesh, cut over the other: as weights are where each group of ranks has all."""
    mesh = world.on_grid.dtensor_mesh
    local, placements = torch.zeros(factor, 17), [Replicate(), Shard(0)]
    given = DTensor.from_local(local, mesh, placements, run_check=False)
    return lambda: shardwise.from_dtensor(given, process_group=dist.group.WORLD) * 2


# Ops ------------------------------------------------------------------------------------------------------------------


def matmul(world: World, factor: int) -> Work:
    """Rows by columns, of which one comes to every rank within the gather budget; or two of the same grid."""
    first, second = world.specs
    if world.grids:
        x, w = (shardwise.zeros(first, *world.wide(factor, factor)) for _ in range(2))
    else:
        x, w = shardwise.zeros(first, world.side, 8 + factor), shardwise.zeros(second, 8 + factor, world.side)
    return lambda: x @ w


def linear(world: World, factor: int) -> Work:
    """Of a plain batch, with a weight of the first spec."""
    weight = shardwise.zeros(world.specs[0], *world.wide(factor, 1)) if world.grids else _tensor(world, factor, 18)
    x = torch.zeros(4, weight.shape[1])
    return lambda: nn.functional.linear(x, weight)


def op(world: World, factor: int, *, width: int, do: Callable[[Any], object]) -> Work:
    return partial(do, _tensor(world, factor, width))


def backward(world: World, factor: int) -> Work:
    """Of a sum, through an elementwise op."""
    x = _tensor(world, factor, 20).requires_grad_()
    return lambda: (x * x).sum().backward()


def embedding(world: World, factor: int) -> Work:
    """Of ids that are the same on every rank, in a table of the first spec."""
    table = shardwise.zeros(world.specs[0], *world.wide(factor, 6)) if world.grids else _tensor(world, factor, 21)
    ids = torch.arange(4)
    return lambda: nn.functional.embedding(ids, table)


def add_other(world: World, factor: int) -> Work:
    first, second = world.specs
    size = world.wide(factor, 5)
    x, y = shardwise.zeros(first, *size), shardwise.zeros(second, *size)
    return lambda: x + y


def _tensor(world: World, factor: int, width: int) -> Any:
    return shardwise.zeros(world.specs[0], *world.narrow(factor, width))


# States ---------------------------------------------------------------------------------------------------------------


def optimizer_state(world: World, factor: int) -> Work:
    module = shardwise.shard_module(Layers(world, factor), plan_of(world))
    optimizer = shardwise.ShardedOptimizer(dict(module.named_parameters()), torch.optim.SGD, lr=0.1, momentum=0.9)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return lambda: optimizer.load_state_dict(optimizer.state_dict())


# DTensor --------------------------------------------------------------------------------------------------------------


def dtensor(world: World, size: tuple[int, ...]) -> DTensor:
    """Of this size, cut as the first spec cuts."""
    local = torch.zeros(world.part(size))
    return DTensor.from_local(local, world.dtensor_mesh, world.dtensor_placements()[0], run_check=False)


def dtensor_op(world: World, factor: int, *, width: int, do: Callable[[Any], object]) -> Work:
    return partial(do, dtensor(world, world.narrow(factor, width)))


def dtensor_matmul(world: World, factor: int) -> Work:
    if world.grids:
        x, w = (dtensor(world, world.wide(factor, factor)) for _ in range(2))
    else:
        x = dtensor(world, (world.side, 8 + factor))
        w = DTensor.from_local(torch.zeros(8 + factor, 1), x.device_mesh, [Shard(1)], run_check=False)
    return lambda: x @ w


def dtensor_redistribute(world: World, factor: int) -> Work:
    tensor = dtensor(world, world.wide(factor, 1))
    return lambda: tensor.redistribute(placements=world.dtensor_placements()[1])


def _slice(x: Any) -> object:
    return x[1:-1]


def _reshape(x: Any) -> object:
    return x.reshape(*x.shape[:-1], 4, 6)


OPS: list[tuple[str, int, Callable[[Any], object]]] = [
    ("x + x", 6, lambda x: x + x),
    ("softmax along a cut dim", 7, lambda x: x.softmax(0)),
    ("sum to a scalar", 9, lambda x: x.sum()),
    ("transpose", 10, lambda x: x.transpose(0, 1)),
    ("slice along a cut dim", 11, _slice),
    ("reshape of a whole dim", 24, _reshape),
]
MORE_OPS: list[tuple[str, int, Callable[[Any], object]]] = [
    ("mean over a cut dim", 12, lambda x: x.mean(0)),
    ("cumsum along a cut dim", 14, lambda x: x.cumsum(0)),
    ("sort along a cut dim", 15, lambda x: x.sort(0)),
    ("cat along a cut dim", 16, lambda x: torch.cat([x, x])),
    ("full_tensor", 1, lambda x: x.full_tensor()),
]
BY_DTENSOR = ("x + x", "softmax along a cut dim", "sum to a scalar")

OF_TENSORS: dict[str, Any] = {"each": "tensor", "count": lambda _: checkpoints.TENSORS, "later": False}

CASES: list[Case[World]] = [
    Case("two specs", make_specs, first=None, later=False),
    Case("layout of a new spec", make_layout, later=False),
    Case(
        f"shard_module, {PARAMETERS} parameters", shard_module, first=1.0, each="parameter", count=lambda _: PARAMETERS
    ),
    Case("zeros", zeros),
    Case("zeros, replicated", replicas, on_grids=False),
    Case("make_plan, first to second spec", partial(plan, width=2), later=False),
    Case("make_plan, to half the ranks", partial(plan, width=2, half=True), later=False),
    Case("make_plan(...).moved", partial(plan, width=3, whole=True), first=None, later=False),
    Case("make_plan(...).moved, to half the ranks", partial(plan, width=3, whole=True, half=True), None, later=False),
    Case("redistribute, first to second spec", redistribute),
    Case("redistribute, to half the ranks", to_half),
    Case("redistribute, to replicas", to_replicas),
    Case("from_dtensor(replicated x cut) * 2", from_dtensor, on_grids=False),
    Case("x @ w", matmul),
    Case("linear of a plain batch", linear),
    *(Case(work, partial(op, width=width, do=do)) for work, width, do in OPS + MORE_OPS),
    Case("embedding of plain ids", embedding),
    Case("sum of squares and its backward", backward),
    Case("x + y of the other spec", add_other),
    Case("training step", training_step, first=None),
    Case(
        "optimizer: state_dict, load_state_dict",
        optimizer_state,
        first=1.0,
        each="parameter",
        count=lambda _: PARAMETERS,
    ),
    Case("save 1,000 tensors: this rank's file", checkpoints.drafting, first=0.2, **OF_TENSORS),
    Case("save 1,000 tensors: the index, by the first rank", checkpoints.indexing, first=0.5, **OF_TENSORS),
    Case("load 1,000 tensors: parse the index", checkpoints.parsing, first=0.5, **OF_TENSORS),
    Case("load 1,000 tensors: find this rank's slabs", checkpoints.finding, first=0.4, **OF_TENSORS),
]

DTENSOR: list[Case[World]] = [
    Case("DTensor: x @ w", dtensor_matmul, first=None, held=False),
    Case("DTensor: redistribute, first to second spec", dtensor_redistribute, first=None, held=False),
    *(
        Case(f"DTensor: {work}", partial(dtensor_op, width=width, do=do), first=None, held=False)
        for work, width, do in OPS
        if work in BY_DTENSOR
    ),
]
