"""Fully sharded training beside FSDP2: `python -m benchmarks.fully_sharded --help`.

A step of a model like Llama with AdamW, each rank with samples of its own. FSDP2 and shardwise shard each block and the
rest; "shares" is shardwise with weights and samples as 2 : 1 : 1 : 1, which FSDP2 has not. All contenders take turns in
one run. Measured are the time of a step, that of the optimizer alone, what is sent, how often the host waits, and on a
GPU the peak of memory above parameters and states.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import shardwise
from benchmarks.llama import Llama, Shape, loss_of
from benchmarks.shape_options import chosen_shape, parser_for
from benchmarks.table import Row, duration, print_lines
from benchmarks.timing import best_of
from benchmarks.wire import watched
from shardwise.testing import run_on_ranks

SHAPES = {  # of batches that 4 ranks and 5 shares divide
    "gloo": Shape(layers=4, width=256, batch=20, sequence=32),
    "nccl": Shape(layers=4, width=1024, head=64, batch=20, sequence=128),
}
SHARES = (2, 1, 1, 1)
STEPS = 3


@dataclass(frozen=True)
class Found:
    """What was measured of one contender."""

    step: float
    optimizer: float
    collectives: int
    host_waits: int | None
    peak: float | None  # MiB above parameters and states


def device_here() -> torch.device:
    nccl = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


class Contender:
    """A model, its optimizer, and how it is fed."""

    def __init__(self, model: nn.Module, feed: Callable[[Tensor], Any], shape: Shape) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ids, labels = torch.randint(
            shape.words, (2, shape.batch, shape.sequence), generator=torch.Generator().manual_seed(1)
        ).to(device_here())
        self._model, self._feed, self._ids, self._labels = model, feed, ids, labels

    def gradients(self) -> None:
        """Forward and backward."""
        loss_of(self._model, self._feed(self._ids), self._feed(self._labels)).backward()

    def step(self) -> None:
        """A step of training."""
        self.gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()


def ours(shape: Shape, *, shares: Sequence[int] | None = None) -> Contender:
    each = shares or [1] * dist.get_world_size()
    parts = [shape.batch * share // sum(each) for share in each]
    parts[0] += shape.batch - sum(parts)
    model = shardwise.fully_shard(start(shape), weights=shares)

    def feed(batch: Tensor) -> Any:
        return shardwise.from_local(batch.split(parts)[dist.get_rank()], sizes=parts)

    return Contender(model, feed, shape)


def fsdp(shape: Shape) -> Contender:
    model: Any = start(shape)
    for block in model.blocks:
        fully_shard(block)
    return Contender(fully_shard(model), lambda batch: batch.chunk(dist.get_world_size())[dist.get_rank()], shape)


def start(shape: Shape) -> nn.Module:
    torch.manual_seed(0)
    return Llama(shape).to(device_here())


def synchronised(work: Callable[[], object]) -> None:
    work()
    if device_here().type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def measure(shape: Shape, blocks: int) -> dict[str, Found]:
    """On every rank."""
    warnings.simplefilter("ignore")
    makers: dict[str, Callable[[Shape], Contender]] = {"shardwise": ours, "FSDP2": fsdp}
    if dist.get_world_size() == len(SHARES):
        makers["shares"] = functools.partial(ours, shares=SHARES)
    peaks: dict[str, float | None] = {}
    contenders: dict[str, Contender] = {}
    for name, make in makers.items():
        contenders[name] = make(shape)
        for _ in range(4):
            contenders[name].step()
        peaks[name] = peak_of(contenders[name].step)

    def several(contender: Contender) -> None:
        for _ in range(STEPS):
            contender.step()

    works = {name: functools.partial(synchronised, functools.partial(several, one)) for name, one in contenders.items()}
    seconds = best_of(works, calls=1, repeats=blocks)
    for one in contenders.values():
        one.gradients()
    steps = {name: functools.partial(synchronised, one.optimizer.step) for name, one in contenders.items()}
    optimizers = best_of(steps, calls=1, repeats=blocks)
    found = {}
    for name, one in contenders.items():
        one.optimizer.zero_grad()
        collectives, waits = sent_by(one, functional=name == "FSDP2")
        found[name] = Found(seconds[name] / STEPS, optimizers[name], collectives, waits, peaks[name])
    return found


def measure_muon(shape: Shape, blocks: int) -> dict[str, float]:
    """A step of Muon on matrices that lie whole on ranks, beside AdamW and Muon on the same matrices as plain ones."""
    warnings.simplefilter("ignore")
    adamw = ours(shape)
    model: Any = shardwise.fully_shard(start(shape), align={"blocks.*.*.*.weight": "parameters"})
    contender = Contender(
        model, lambda batch: shardwise.from_local(batch.chunk(dist.get_world_size())[dist.get_rank()]), shape
    )
    for one in (adamw, contender):
        for _ in range(3):
            one.step()
        one.gradients()
    matrices = [one for one in model.blocks.parameters() if one.ndim == 2]
    plain = [local.detach().clone().requires_grad_() for one in matrices for local in one._local_tensors()]
    for one in plain:
        one.grad = torch.rand_like(one)
    muons = torch.optim.Muon(matrices, lr=1e-3), torch.optim.Muon(plain, lr=1e-3) if plain else None
    works: dict[str, Callable[[], object]] = {
        "shardwise": muons[0].step,
        "matrices": lambda: None if muons[1] is None else muons[1].step(),
        "AdamW": adamw.optimizer.step,
    }
    for work in works.values():
        work()
    found = best_of(
        {name: functools.partial(synchronised, work) for name, work in works.items()}, calls=1, repeats=blocks
    )
    return {"shardwise": found["shardwise"], "AdamW and matrices": found["AdamW"] + found["matrices"]}


def peak_of(step: Callable[[], object]) -> float | None:
    """The most memory of a step above that between steps, on any rank."""
    if device_here().type == "cpu":
        return None
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    most = torch.tensor(float(torch.cuda.max_memory_allocated() - before), device=device_here())
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most) / 2**20


def sent_by(contender: Contender, *, functional: bool) -> tuple[int, int | None]:
    """Collectives that carry data, and waits of the host."""
    gc.collect()
    with watched(functional=functional) as wire:
        contender.step()
    return wire.collectives, wire.host_waits if device_here().type == "cuda" else None


def show(found: dict[str, Found], shape: Shape, backend: str, ranks: int) -> None:
    what = f"{shape.layers} layers of {shape.width}, batch {shape.batch} x {shape.sequence}, AdamW"
    print(f"\nFully sharded training: {what}, {ranks} {backend} rank{'s' * (ranks > 1)}\n")
    lines = [["", "a step", "beside FSDP2", "optimizer", "beside FSDP2", "collectives", "host waits", "peak MiB"]]
    other = found["FSDP2"]
    for name, one in found.items():
        figures = [str(one.collectives), "–" if one.host_waits is None else str(one.host_waits)]
        figures.append("–" if one.peak is None else f"{one.peak:.0f}")
        ratios = [f"{one.step / other.step:.2f}x", f"{one.optimizer / other.optimizer:.2f}x"]
        lines.append([name, duration(one.step), ratios[0], duration(one.optimizer), ratios[1], *figures])
    print_lines(lines)


def run(shape: Shape = SHAPES["gloo"], backend: str = "gloo", ranks: int = 4, blocks: int = 7) -> list[Row]:
    """Measure on ranks of their own, and print what was found; gives what is held to a budget."""
    found: dict[str, Found] = run_on_ranks(ranks, measure, shape, blocks, timeout=550, fresh=True, backend=backend)[0]
    show(found, shape, backend, ranks)
    ours, other = found["shardwise"], found["FSDP2"]
    where, most = f"{ranks} {backend} ranks", 0.95 if ranks > 1 else 1.0
    steps, optimizers = (
        {"shardwise": a, "FSDP2": b} for a, b in ((ours.step, other.step), (ours.optimizer, other.optimizer))
    )
    rows = [
        Row(f"fully sharded step, {where}", steps, f"≤ {most} FSDP2", ("FSDP2", most)),
        Row(f"AdamW on fully sharded parameters, {where}", optimizers, "≤ 0.5 FSDP2", ("FSDP2", 0.5)),
    ]
    if "shares" in found:
        uneven = {"shardwise": found["shares"].step, "even": ours.step}
        rows.append(Row(f"the same in shares 2 : 1 : 1 : 1, {where}", uneven, "≤ 1.1 even", ("even", 1.1)))
    muon = run_on_ranks(ranks, measure_muon, shape, blocks, timeout=550, fresh=True, backend=backend)[0]
    what, budget = f"Muon on whole matrices, fully sharded, {where}", "≤ 1.1 AdamW and matrices"
    rows.append(Row(what, muon, budget, ("AdamW and matrices", 1.1)))
    print(
        "\n  " + ", ".join(f"{name}: {duration(seconds)}" for name, seconds in {what: 0.0, **muon}.items() if seconds)
    )
    return rows


def main() -> None:
    parser = parser_for(__doc__, SHAPES)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=7, help="of three steps each, of which the fastest counts")
    given = parser.parse_args()
    run(chosen_shape(given, SHAPES), given.backend, given.ranks, given.blocks)


if __name__ == "__main__":
    from benchmarks import fully_sharded  # as the ranks import it

    fully_sharded.main()
