"""A training step of a model like Llama on four ranks, beside DTensor: `python -m benchmarks.training --help`.

The plans, each with what is natural on either side:

tensor   q, k, v, gate and up cut by rows, o and down by columns; all else is plain, and so is the batch, the same on
         every rank. shardwise: `shard_module` with these cuts. DTensor: `parallelize_module` with `ColwiseParallel` and
         `RowwiseParallel`.
batch    each rank has samples of its own and a part of every weight, cut along dim 0. shardwise: `from_local` and
         `shard_module`. DTensor: `DTensor.from_local` and `distribute_module`. FSDP2: `fully_shard` of each block and
         of the model, which gathers weights and scatters gradients.
uneven   as tensor, but of the heads and features the ranks have parts as 3 : 2 : 2 : 1. DTensor has no such cut: it
         runs its even plan.
"""

from __future__ import annotations

import copy
import functools
import gc
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise
from benchmarks.llama import Llama, Shape, loss_of
from benchmarks.shape_options import chosen_shape, parser_for
from benchmarks.table import Row, duration, print_lines
from benchmarks.timing import Work, best_of
from benchmarks.wire import watched
from shardwise.testing import run_on_ranks

PLANS = ("tensor", "batch", "uneven")
BY_ROWS, BY_COLUMNS = ("q", "k", "v", "gate", "up"), ("o", "down")
MODULE = {name: f"blocks.*.{'attention' if name in 'qkvo' else 'feed_forward'}.{name}" for name in BY_ROWS + BY_COLUMNS}
RANKS = 4
SHAPES = {"gloo": Shape(), "nccl": Shape()}
SHARES = (3, 2, 2, 1)  # of heads and features, in the uneven plan
RATE = 0.1
LIMIT = ("DTensor", 0.8)  # most of its time

Feed = Callable[[Tensor], Any]  # the batch as it is fed, of the whole batch


@dataclass(frozen=True)
class Counts:
    """What one step of one contender sends: by all ranks, or by the rank that does so most often."""

    collectives: int
    bytes: int
    control: int
    host_waits: int | None  # None on CPUs
    kinds: dict[str, int]


@dataclass(frozen=True)
class Trained:
    """One plan, measured."""

    row: Row
    counts: dict[str, Counts] = field(default_factory=dict)


# The contenders -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """A model, and how it is fed."""

    model: nn.Module
    feed: Feed
    averages: bool = False  # its loss is of this rank's samples


def device_here() -> torch.device:
    nccl = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def mesh_here() -> DeviceMesh:
    return init_device_mesh(device_here().type, (dist.get_world_size(),))


def places() -> list[str]:
    """Of all ranks; a rank knows the index of its own GPU only, so all of them share one or have one each."""
    kind, count = device_here().type, max(torch.cuda.device_count(), 1)
    return [f"rank:{rank}/cpu" if kind == "cpu" else f"rank:{rank}/cuda:{rank % count}" for rank in range(RANKS)]


def same(batch: Tensor) -> Tensor:
    return batch


def mine(batch: Tensor) -> Tensor:
    return batch.chunk(RANKS)[dist.get_rank()]


def our_tensor_parallel(model: nn.Module, shape: Shape, *, even: bool = True) -> Contender:
    def spec(dim: int, count: int) -> shardwise.ShardingSpec:
        if even:
            return shardwise.ChunkShardingSpec(dim, places())
        unit = count // sum(SHARES)
        return shardwise.GridShardingSpec((dim,), places(), sizes=[[unit * share for share in SHARES]])

    count = dict.fromkeys("qkvo", shape.width) | dict.fromkeys(("gate", "up", "down"), shape.inner)
    cuts: dict[str, Any] = {f"{MODULE[name]}.weight": spec(0, count[name]) for name in BY_ROWS}
    cuts |= {f"{MODULE[name]}.weight": spec(1, count[name]) for name in BY_COLUMNS}
    return Contender(shardwise.shard_module(model, shardwise.ShardingPlan(cuts)), same)


def dtensor_tensor_parallel(model: nn.Module, shape: Shape) -> Contender:
    styles: dict[str, Any] = {MODULE[name]: ColwiseParallel() for name in BY_ROWS}
    styles |= {MODULE[name]: RowwiseParallel() for name in BY_COLUMNS}
    return Contender(parallelize_module(model, mesh_here(), styles), same)


def our_sharded_batch(model: nn.Module, shape: Shape) -> Contender:
    plan = shardwise.ShardingPlan({"**.weight": shardwise.ChunkShardingSpec(0, places())})
    sizes = [shape.batch // RANKS] * RANKS
    return Contender(shardwise.shard_module(model, plan), lambda batch: shardwise.from_local(mine(batch), sizes=sizes))


def dtensor_sharded_batch(model: nn.Module, shape: Shape) -> Contender:
    mesh = mesh_here()

    def cut(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))

    distribute_module(model, mesh, cut)
    return Contender(model, lambda batch: DTensor.from_local(mine(batch), mesh, [Shard(0)]))


def fsdp(model: Any, shape: Shape) -> Contender:
    mesh = mesh_here()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return Contender(fully_shard(model, mesh=mesh), mine, averages=True)


CONTENDERS: dict[str, dict[str, Callable[[nn.Module, Shape], Contender]]] = {
    "tensor": {"shardwise": our_tensor_parallel, "DTensor": dtensor_tensor_parallel},
    "batch": {"shardwise": our_sharded_batch, "DTensor": dtensor_sharded_batch, "FSDP2": fsdp},
    "uneven": {
        "shardwise": functools.partial(our_tensor_parallel, even=False),
        "DTensor": dtensor_tensor_parallel,
    },
}


# A step ---------------------------------------------------------------------------------------------------------------


def start(shape: Shape, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    """The plain model, and the whole batch with its labels, the same on every rank."""
    torch.manual_seed(0)
    device = device_here()
    model = Llama(shape).to(device, dtype)
    ids, labels = torch.randint(shape.words, (2, shape.batch, shape.sequence)).to(device)
    return model, ids, labels


def step_of(contender: Contender, ids: Tensor, labels: Tensor) -> Work:
    """Forward, loss, backward, SGD. The batch is made what it is fed as in each step anew."""
    optimizer = torch.optim.SGD(contender.model.parameters(), lr=RATE, foreach=False)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(contender.model, contender.feed(ids), contender.feed(labels))
        loss.backward()
        optimizer.step()
        return loss

    return step


def whole(value: Any) -> Tensor:
    """Of a tensor of any kind."""
    tensor: Tensor = value.full_tensor() if isinstance(value, shardwise.ShardedTensor | DTensor) else value
    return tensor.detach()


def check(name: str, make: Callable[[nn.Module, Shape], Contender], shape: Shape) -> None:
    """In float64, after two steps: the loss, and the gradient of every parameter, beside those of the plain model."""
    model, ids, labels = start(shape, torch.float64)
    contender = make(copy.deepcopy(model), shape)
    plain, other = step_of(Contender(model, same), ids, labels), step_of(contender, ids, labels)
    for _ in range(2):
        expected, loss = plain(), whole(other())
    if contender.averages:
        dist.all_reduce(loss)
        loss = loss / RANKS
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=0)  # type: ignore[attr-defined] # a tensor
    theirs = dict(contender.model.named_parameters())
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        found = whole(theirs[key].grad)
        atol = 1e-9 * parameter.grad.abs().max().item()
        assert torch.allclose(found, parameter.grad, rtol=0, atol=atol), f"{name}: the gradient of {key} differs"


def train(plan: str, shape: Shape, blocks: int = 7, steps: int = 3) -> Trained:
    """On every rank: check, count, and time the contenders of a plan, who take turns."""
    warnings.simplefilter("ignore")
    able: dict[str, Work] = {}
    raised: dict[str, str] = {}
    for name, make in CONTENDERS[plan].items():
        try:
            check(name, make, shape)
            model, ids, labels = start(shape, torch.float32)
            able[name] = step_of(make(model, shape), ids, labels)
            for _ in range(3):
                able[name]()
        except Exception as error:  # on every rank
            raised[name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            able.pop(name, None)
    counts = {name: count(step, functional=name != "shardwise") for name, step in able.items()}
    seconds = {name: found / steps for name, found in best_of(blocks_of(able, steps), calls=1, repeats=blocks).items()}
    seconds |= dict.fromkeys(raised, float("inf"))
    held = "DTensor" in able and plan != "batch"
    what = f"{plan}: {shape.layers} layers of {shape.width}, batch {shape.batch} x {shape.sequence}"
    work = f"training step, {what}, {dist.get_backend()}"
    return Trained(Row(work, seconds, "≤ 0.8x DTensor" * held, LIMIT if held else None, raised), counts)


def blocks_of(able: Mapping[str, Work], steps: int) -> dict[str, Work]:
    """Several steps, after which all ranks and their GPUs are done."""

    def block(step: Work) -> None:
        for _ in range(steps):
            step()
        if device_here().type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    return {name: functools.partial(block, step) for name, step in able.items()}


def count(step: Work, *, functional: bool) -> Counts:
    gc.collect()
    with watched(functional=functional) as wire:
        step()
    found: list[Any] = [None] * RANKS
    kinds: dict[str, int] = {}
    for one in wire.sent:
        kinds[one.kind] = kinds.get(one.kind, 0) + (not one.control)
    dist.all_gather_object(found, (wire.collectives, wire.bytes, wire.control_messages, wire.host_waits))
    collectives, sizes, control, waits = zip(*found, strict=True)
    on_gpu = device_here().type == "cuda"
    return Counts(max(collectives), round(sum(sizes)), max(control), max(waits) if on_gpu else None, kinds)


# What is printed ------------------------------------------------------------------------------------------------------


def show_training(trained: Trained) -> None:
    row = trained.row
    print(f"\n{row.work.capitalize()}, {RANKS} ranks\n")
    lines = [["", "a step", "ours / theirs", "collectives", "MiB sent by all", "control messages", "host waits", ""]]
    for name, counts in trained.counts.items():
        ratio = "" if name == "shardwise" else f"{row.seconds['shardwise'] / row.seconds[name]:.2f}x"
        waits = "–" if counts.host_waits is None else str(counts.host_waits)
        kinds = ", ".join(f"{number} {kind}" for kind, number in counts.kinds.items() if number)
        figures = [str(counts.collectives), f"{counts.bytes / 2**20:.2f}", str(counts.control), waits, kinds]
        lines.append([name, duration(row.seconds[name]), ratio, *figures])
    print_lines(lines)
    for name, why in row.raised.items():
        print(f"  {name} raises {why}")


def run(plan: str, shape: Shape = SHAPES["gloo"], backend: str = "gloo", blocks: int = 7) -> Row:
    """Measure a plan on ranks of their own, and print what was found."""
    trained = run_on_ranks(RANKS, train, plan, shape, blocks, timeout=550, fresh=True, backend=backend)[0]
    show_training(trained)
    row: Row = trained.row
    return row


def main() -> None:
    parser = parser_for(__doc__, SHAPES)
    parser.add_argument("--plan", choices=PLANS, action="append", help="one or more; all if none is given")
    parser.add_argument("--blocks", type=int, default=7, help="of three steps each, of which the fastest counts")
    given = parser.parse_args()
    for plan in given.plan or PLANS:
        run(plan, chosen_shape(given, SHAPES), given.backend, given.blocks)


if __name__ == "__main__":
    from benchmarks import training  # as ranks import it, and what they send back

    training.main()
