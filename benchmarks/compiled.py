"""A compiled training step of a model like Llama under tensor parallelism: `python -m benchmarks.compiled --help`.

The contenders take turns in one run: shardwise as it is, shardwise compiled with fullgraph=True (parts of equal size,
and as 3 : 2 : 2 : 1), and DTensor's `parallelize_module`, compiled. On one rank the plain model, compiled, runs beside
them. A step is forward, loss and backward; printed are the time of a step, and what all ranks have computed of it.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from benchmarks.llama import Llama, Shape, loss_of
from benchmarks.shape_options import chosen_shape, parser_for
from benchmarks.table import duration, print_lines
from benchmarks.timing import best_together
from benchmarks.training import SHARES, device_here, dtensor_tensor_parallel, our_tensor_parallel, whole
from shardwise.testing import run_on_ranks

SHAPES = {"gloo": Shape(), "nccl": Shape(layers=4, width=1024, head=64, batch=4, sequence=256)}


@dataclass(frozen=True)
class Found:
    """What was measured of one contender."""

    step: float
    first: float  # seconds of the first step, which compiles
    loss: float
    graphs: int | None  # compiled by shardwise in all steps


Loss = Callable[[Tensor, Tensor], Any]  # of ids and labels


def makers(shape: Shape, backend: str) -> dict[str, Callable[[], tuple[nn.Module, Loss]]]:
    """A model, and the function that gives its loss, of each contender."""

    def sharded(even: bool, compiles: bool) -> tuple[nn.Module, Loss]:
        model = our_tensor_parallel(start(shape), shape, even=even).model
        loss = loss_function(model)
        return model, shardwise.compile(loss, fullgraph=True, backend=backend) if compiles else loss

    def dtensors() -> tuple[nn.Module, Loss]:
        model = dtensor_tensor_parallel(start(shape), shape).model
        return model, torch.compile(loss_function(model), backend=backend)

    def in_one_piece(compiles: bool) -> tuple[nn.Module, Loss]:
        """All parameters are sharded, in one piece."""
        model = start(shape)
        shardwise.shard_module(model, shardwise.plans.rows(model))
        loss = loss_function(model)
        return model, shardwise.compile(loss, fullgraph=True, backend=backend) if compiles else loss

    def plain() -> tuple[nn.Module, Loss]:
        model = start(shape)
        return model, torch.compile(loss_function(model), backend=backend)

    if dist.get_world_size() == 1:
        return {
            "shardwise": functools.partial(in_one_piece, False),
            "shardwise, compiled": functools.partial(in_one_piece, True),
            "plain, compiled": plain,
        }
    return {
        "shardwise": functools.partial(sharded, True, False),
        "shardwise, compiled": functools.partial(sharded, True, True),
        "shardwise 3 : 2 : 2 : 1, compiled": functools.partial(sharded, False, True),
        "DTensor, compiled": dtensors,
    }


def loss_function(model: nn.Module) -> Loss:
    def loss(ids: Tensor, labels: Tensor) -> Any:
        return loss_of(model, ids, labels)

    return loss


def start(shape: Shape) -> nn.Module:
    torch.manual_seed(0)
    return Llama(shape).to(device_here())


def measure(shape: Shape, backend: str, repeats: int) -> dict[str, Found]:
    """On every rank."""
    warnings.simplefilter("ignore")
    if device_here().type == "cpu":
        torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(shape.words, (2, shape.batch, shape.sequence), generator=generator).to(device_here())
    steps: dict[str, Callable[[], Any]] = {}
    first: dict[str, float] = {}
    losses: dict[str, float] = {}
    called: dict[str, Any] = {}
    for name, make in makers(shape, backend).items():
        model, called[name] = make()
        steps[name] = functools.partial(step, model, called[name], ids, labels)
        dist.barrier()
        begin = time.perf_counter()
        loss = steps[name]()
        first[name] = time.perf_counter() - begin
        losses[name] = float(whole(loss))
        for _ in range(2):
            steps[name]()
    seconds = best_together(steps, repeats)
    return {name: Found(seconds[name], first[name], losses[name], graphs_of(called[name])) for name in steps}


def step(model: nn.Module, called: Loss, ids: Tensor, labels: Tensor) -> Any:
    """Gives the loss as the contender does."""
    model.zero_grad()
    loss = called(ids, labels)
    loss.backward()
    if device_here().type == "cuda":
        torch.cuda.synchronize()
    return loss


def graphs_of(called: Any) -> int | None:
    graph = getattr(called, "full_graph", None)
    return None if graph is None else int(graph.graphs)


def run(shape: Shape, group: str, ranks: int, backend: str, repeats: int) -> None:
    found = run_on_ranks(ranks, measure, shape, backend, repeats, backend=group, timeout=1800)[0]
    beside = found.get("DTensor, compiled") or found["plain, compiled"]
    name = "DTensor" if "DTensor, compiled" in found else "plain"
    lines = [["", "a step", f"beside {name}, compiled", "the first step", "graphs", "loss"]]
    for contender, one in found.items():
        times = f"{one.step / beside.step:.2f} x"
        graphs = "–" if one.graphs is None else str(one.graphs)
        lines.append([contender, duration(one.step), times, duration(one.first), graphs, f"{one.loss:.6f}"])
    print(f"A compiled step on {ranks} {group} ranks, backend {backend}, {shape}; shares {SHARES}")
    print_lines(lines)


def main() -> None:
    parser = parser_for(__doc__, SHAPES)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--compiler", default="inductor", help="a backend of torch.compile")
    parser.add_argument("--repeats", type=int, default=9, help="of which the fastest counts")
    given = parser.parse_args()
    run(chosen_shape(given, SHAPES), given.backend, given.ranks, given.compiler, given.repeats)


if __name__ == "__main__":
    from benchmarks import compiled  # as the ranks import it

    compiled.main()
