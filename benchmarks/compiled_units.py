"""Compiled units of sharded models beside the same models uncompiled: `python -m benchmarks.compiled_units --help`.

A step of a model like Llama with AdamW: fully sharded, each rank with samples of its own, and tensor parallel; on four
ranks both also in shares of 3 : 2 : 2 : 1. Eager models, models with compiled units and models in one graph
(fullgraph=True) take turns in one run. Printed are the times of a step, the processor time of all ranks, and on GPUs
the peak of memory above parameters and states; of units also how many graphs were compiled on the rank that has most,
and how many of these after the second step.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from benchmarks.fully_sharded import peak_of
from benchmarks.llama import Llama, Shape, loss_of
from benchmarks.shape_options import chosen_shape, parser_for
from benchmarks.table import duration, print_lines
from benchmarks.timing import both_together
from benchmarks.training import SHARES, device_here, our_tensor_parallel
from shardwise.testing import run_on_ranks

SHAPES = {
    "gloo": Shape(layers=2, width=256, batch=16, sequence=64),
    "nccl": Shape(layers=4, width=1024, head=64, batch=64, sequence=256),
}
DTYPES = ("float32", "bfloat16")
STEPS = 2  # in a block of measured ones
WARM_UP = 4  # steps, of which the first two may compile


@dataclass(frozen=True)
class Found:
    """What was measured of one set-up."""

    seconds: dict[str, float]  # of a step, by contender
    processor: dict[str, float]  # of all ranks
    peaks: dict[str, float | None]  # MiB above parameters and states
    graphs: int  # compiled on the rank that has most
    late: int  # of these, after the second step


class Graphs:
    """A backend that counts the graphs it is given in each step."""

    def __init__(self, compiler: str) -> None:
        self._compiler, self.step = compiler, 0
        self.steps: list[int] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo import lookup_backend  # loads the compiler

        self.steps.append(self.step)
        return lookup_backend(self._compiler)(graph, inputs)


class Contender:
    """A model, its optimizer and its batch."""

    def __init__(self, model: nn.Module, feed: Callable[[Tensor], Any], shape: Shape) -> None:
        self.model, self._optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-3)
        ids, labels = torch.randint(
            shape.words, (2, shape.batch, shape.sequence), generator=torch.Generator().manual_seed(1)
        ).to(device_here())
        self._ids, self._labels = feed(ids), feed(labels)

    def step(self) -> None:
        """A step of training."""
        loss_of(self.model, self._ids, self._labels).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def several(self) -> None:
        """Some of them; a GPU has done them at the end."""
        for _ in range(STEPS):
            self.step()
        if device_here().type == "cuda":
            torch.cuda.synchronize()


def fully_sharded(shape: Shape, dtype: torch.dtype, *, even: bool) -> Contender:
    shares = (1,) * dist.get_world_size() if even else SHARES
    parts = [shape.batch * share // sum(shares) for share in shares]
    model = shardwise.fully_shard(start(shape, dtype), weights=None if even else SHARES)

    def feed(batch: Tensor) -> Any:
        return shardwise.from_local(batch.split(parts)[dist.get_rank()], sizes=parts)

    return Contender(model, feed, shape)


def tensor_parallel(shape: Shape, dtype: torch.dtype, *, even: bool) -> Contender:
    made = our_tensor_parallel(start(shape, dtype), shape, even=even)
    return Contender(made.model, made.feed, shape)


def start(shape: Shape, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return Llama(shape).to(device_here(), dtype)


SET_UPS: dict[str, Callable[[Shape, torch.dtype], Contender]] = {
    "fully sharded": functools.partial(fully_sharded, even=True),
    "fully sharded, 3 : 2 : 2 : 1": functools.partial(fully_sharded, even=False),
    "tensor parallel": functools.partial(tensor_parallel, even=True),
    "tensor parallel, 3 : 2 : 2 : 1": functools.partial(tensor_parallel, even=False),
}
EVEN = ("fully sharded", "tensor parallel")


def measure(set_up: str, shape: Shape, dtype: torch.dtype, compiler: str, blocks: int) -> Found:
    """On every rank."""
    warnings.simplefilter("ignore")
    graphs = Graphs(compiler)
    contenders = {name: SET_UPS[set_up](shape, dtype) for name in ("eager", "units", "one graph")}
    shardwise.compile(contenders["units"].model, backend=graphs)
    whole = contenders["one graph"]
    whole.model = shardwise.compile(whole.model, fullgraph=True, backend=compiler)
    for graphs.step in range(WARM_UP):
        for one in contenders.values():
            one.step()
    seconds, processor = both_together({name: one.several for name, one in contenders.items()}, blocks)
    peaks = {name: peak_of(one.step) for name, one in contenders.items()}
    counts = torch.tensor([len(graphs.steps), sum(step > 1 for step in graphs.steps)], device=device_here())
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    of_step = [{name: value / STEPS for name, value in found.items()} for found in (seconds, processor)]
    return Found(of_step[0], of_step[1], peaks, *map(int, counts.tolist()))


def show(set_up: str, found: Found) -> None:
    head = [set_up, "a step", "beside eager", "processor time", "peak MiB", "graphs", "after the second step"]
    lines = [head]
    for name, seconds in found.seconds.items():
        ratios = [f"{part[name] / part['eager']:.2f}x" for part in (found.seconds, found.processor)]
        peak = found.peaks[name]
        counts = [str(found.graphs), str(found.late)] if name == "units" else ["", ""]
        lines.append([name, duration(seconds), *ratios, "–" if peak is None else f"{peak:.0f}", *counts])
    print()
    print_lines(lines)


def run(
    shape: Shape = SHAPES["gloo"],
    dtype: str = "float32",
    backend: str = "gloo",
    compiler: str = "inductor",
    blocks: int = 7,
    only: Sequence[str] = tuple(SET_UPS),
    ranks: int = len(SHARES),
) -> None:
    """Measure on ranks of their own, and print what was found."""
    what = f"{shape.layers} layers of {shape.width}, batch {shape.batch} x {shape.sequence}, {dtype}, AdamW"
    print(f"\nCompiled models ({compiler}): {what}, {ranks} {backend} rank{'s' * (ranks > 1)}")
    options: dict[str, Any] = {"timeout": 550, "fresh": True, "backend": backend}
    for name in [one for one in only if ranks == len(SHARES) or one in EVEN]:
        show(name, run_on_ranks(ranks, measure, name, shape, getattr(torch, dtype), compiler, blocks, **options)[0])


def main() -> None:
    parser = parser_for(__doc__, SHAPES)
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of parameters and activations")
    parser.add_argument("--compiler", default="inductor", help="a backend of torch.compile")
    parser.add_argument("--blocks", type=int, default=7, help="of two steps each, of which the fastest counts")
    parser.add_argument("--only", nargs="+", choices=SET_UPS, default=tuple(SET_UPS), help="set-ups")
    parser.add_argument("--ranks", type=int, choices=(1, len(SHARES)), default=len(SHARES))
    given = parser.parse_args()
    shape = chosen_shape(given, SHAPES)
    run(shape, given.dtype, given.backend, given.compiler, given.blocks, given.only, given.ranks)


if __name__ == "__main__":
    from benchmarks import compiled_units  # as the ranks import it

    compiled_units.main()
