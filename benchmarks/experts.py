"""Experts on ranks beside DTensor's expert parallelism: `python -m benchmarks.experts --help`.

A step of a model like Llama, whose feed-forward layers are mixtures of experts, with AdamW, each rank with samples of
its own. Experts lie on ranks, the rest is fully sharded. "DTensor" is written by hand as torchtitan does it: experts
are DTensors, a token is sent once for each choice, sorted by experts, and FSDP2 shards the rest. "copies" is shardwise
with a copy of each expert on every other rank, "uneven" with experts as 4 : 2 : 1 : 1, which DTensor has not. All
contenders take turns in one run, from the same values. Measured are the time of a step and of one layer alone, and the
bytes that tokens take; the processor time of a step tells the work of a rank where others use the machine, too.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 # as everybody calls it
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardwise
from benchmarks.fully_sharded import device_here, synchronised
from benchmarks.llama import Llama, Shape, loss_of
from benchmarks.shape_options import chosen_shape, parser_for
from benchmarks.table import Row, duration, print_lines
from benchmarks.timing import best_of, least_processor_time
from shardwise import plans
from shardwise.testing import run_on_ranks

STEPS = 3


@dataclass(frozen=True)
class MixtureShape(Shape):
    """With so many experts, of which each token chooses some."""

    layers: int = 3
    width: int = 256
    words: int = 256
    batch: int = 16
    sequence: int = 64
    experts: int = 8
    choices: int = 2


SHAPES = {"gloo": MixtureShape(), "nccl": MixtureShape(width=1024, sequence=256)}


class Experts(nn.Module):
    """Gate, up and down of every expert, as torchtitan and transformers have them: stacked."""

    def __init__(self, shape: MixtureShape) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.randn(shape.experts, shape.inner, shape.width) / 16) for _ in range(2))
        self.down = nn.Parameter(torch.randn(shape.experts, shape.width, shape.inner) / 16)

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order = torch.argsort(chosen.reshape(-1), stable=True)
        token = order // chosen.shape[1]
        counts = torch.bincount(chosen.reshape(-1), minlength=len(self.down)).tolist()
        made = compute(tokens[token], counts, self.gate, self.up, self.down) * weights.reshape(-1)[order, None]
        return torch.zeros_like(tokens).index_add_(0, token, made)


def compute(rows: Tensor, counts: Sequence[int], *weights: Tensor) -> Tensor:
    """Rows that are sorted by experts, of which each has so many."""
    made = [
        F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down)
        for part, gate, up, down in zip(rows.split(list(counts)), *weights, strict=True)
        if len(part)
    ]
    return torch.cat(made) if made else rows


class Mixture(nn.Module):
    """A router and experts."""

    def __init__(self, shape: MixtureShape) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(shape.width, shape.experts, bias=False), Experts(shape)
        self.choices = shape.choices

    def forward(self, x: Tensor) -> Any:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.topk(torch.softmax(self.router(tokens), -1), self.choices, -1)
        return self.experts(tokens, chosen, weights).reshape(x.shape)


class TitanExperts(Experts):
    """Experts as DTensors: tokens are sorted by experts, sent once for each choice, and sorted again on arrival."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        group, ranks = dist.group.WORLD, dist.get_world_size()
        assert group is not None
        order = torch.argsort(chosen.reshape(-1), stable=True)
        token = order // chosen.shape[1]
        counts = torch.bincount(chosen.reshape(-1), minlength=len(self.down))
        with torch.no_grad():
            there = torch.empty_like(counts)
            dist.all_to_all_single(there, counts)
            here = there.view(ranks, -1)
            splits = torch.stack([counts.view(ranks, -1).sum(1), here.sum(1)]).tolist()
        came = all_to_all_single_autograd(tokens[token], splits[1], splits[0], group)
        # Rows come rank by rank, and expert by expert within; experts want all of theirs together.
        expert = torch.arange(here.shape[1], device=tokens.device).repeat(ranks)
        by_expert = torch.argsort(expert.repeat_interleave(here.reshape(-1)), stable=True)
        local = [one.to_local() for one in (self.gate, self.up, self.down) if isinstance(one, DTensor)]
        made = compute(came[by_expert], here.sum(0).tolist(), *local)
        back = torch.empty_like(by_expert)
        back[by_expert] = torch.arange(len(by_expert), device=tokens.device)
        results = all_to_all_single_autograd(made[back].contiguous(), splits[0], splits[1], group)
        return torch.zeros_like(tokens).index_add_(0, token, results * weights.reshape(-1)[order, None])


def model_of(shape: MixtureShape, experts: type[Experts] = Experts) -> Any:
    """The same values for every contender, on every rank."""
    torch.manual_seed(0)
    model: Any = Llama(shape)
    for block in model.blocks:
        block.feed_forward = Mixture(shape)
        block.feed_forward.experts.__class__ = experts
    return model.to(device_here())


class Contender:
    """A model, its optimizer, and how it is fed."""

    def __init__(self, model: nn.Module, feed: Callable[[Tensor], Any], shape: MixtureShape) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(1)
        ids, labels = torch.randint(shape.words, (2, shape.batch, shape.sequence), generator=generator).to(
            device_here()
        )
        tokens = torch.randn(shape.batch * shape.sequence, shape.width, generator=generator)
        chosen = torch.stack([torch.arange(len(tokens)) * (3 * k + 1) for k in range(shape.choices)], 1) % shape.experts
        weights = torch.full(chosen.shape, 0.5)
        self._batch = feed(ids), feed(labels)
        self._routed = [feed(one.to(device_here())) for one in (tokens, chosen, weights)]

    def loss(self) -> Any:
        return loss_of(self.model, *self._batch)

    def step(self) -> None:
        """A step of training."""
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def layer(self) -> None:
        """Forward and backward of one layer of experts, without its router."""
        mixture: Any = self.model.blocks[0].feed_forward  # type: ignore[union-attr, index] # a list of blocks
        tokens, chosen, weights = self._routed
        mixture.experts(tokens.detach().requires_grad_(), chosen, weights).backward(tokens)
        for one in mixture.experts.parameters():
            one.grad = None


def ours(shape: MixtureShape, **where: Any) -> Contender:
    model = model_of(shape)
    # Attention runs on plain samples; norms and routers are few parameters, gathered once with the rest.
    plan = plans.expert_parallel(model, rest=plans.FullyShard(units="blocks.*.attention"), **where)
    ranks = dist.get_world_size()
    return Contender(
        shardwise.shard_module(model, plan), lambda one: shardwise.from_local(one.chunk(ranks)[dist.get_rank()]), shape
    )


def titan(shape: MixtureShape) -> Contender:
    model, ranks = model_of(shape, TitanExperts), dist.get_world_size()
    mesh = init_device_mesh(device_here().type, (ranks,))
    kept: set[nn.Parameter] = set()
    for block in model.blocks:
        experts = block.feed_forward.experts
        for name, one in list(experts.named_parameters()):
            sharded = nn.Parameter(distribute_tensor(one.detach(), mesh, [Shard(0)]))
            sharded.register_post_accumulate_grad_hook(_average)
            setattr(experts, name, sharded)
            kept.add(sharded)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, ignored_params=kept)
    fully_shard(model, mesh=mesh, ignored_params=kept)
    return Contender(model, lambda one: one.chunk(ranks)[dist.get_rank()], shape)


def _average(parameter: Tensor) -> None:
    """As FSDP2 does: the loss is the mean over ranks."""
    assert parameter.grad is not None
    parameter.grad /= dist.get_world_size()


@dataclass(frozen=True)
class Found:
    """What was measured of one contender, on all ranks together where it is bytes."""

    step: float
    processor: float  # seconds of a step that a rank computes, whoever else the machine works for
    layer: float
    loss: float


def measure(shape: MixtureShape, blocks: int) -> tuple[dict[str, Found], dict[str, float]]:
    """On every rank: what was found, and bytes of tokens in a forward of one layer."""
    warnings.simplefilter("ignore")
    ranks = dist.get_world_size()
    makers: dict[str, Callable[[MixtureShape], Contender]] = {"shardwise": ours, "DTensor": titan}
    if ranks == 4:
        makers["uneven"] = functools.partial(ours, weights=[4, 2, 1, 1])
        holders = [(k % ranks, (k + ranks // 2) % ranks) for k in range(shape.experts)]
        makers["copies"] = functools.partial(ours, placement=holders)
    contenders = {name: make(shape) for name, make in makers.items()}
    losses = {name: mean_loss(one) for name, one in contenders.items()}
    for one in contenders.values():
        for _ in range(3):
            one.step()

    def several(work: Callable[[], None]) -> None:
        for _ in range(STEPS):
            work()

    steps = {
        name: functools.partial(synchronised, functools.partial(several, one.step)) for name, one in contenders.items()
    }
    layers = {
        name: functools.partial(synchronised, functools.partial(several, one.layer)) for name, one in contenders.items()
    }
    seconds = best_of(steps, calls=1, repeats=blocks)
    alone = best_of(layers, calls=1, repeats=blocks)
    processor = least_processor_time({name: one.step for name, one in contenders.items()}, warm_up=1, steps=blocks)
    found = {
        name: Found(seconds[name] / STEPS, processor[name], alone[name] / STEPS, losses[name]) for name in contenders
    }
    return found, sent_by_layer(contenders["shardwise"], shape)


def mean_loss(one: Contender) -> float:
    """Of all samples."""
    loss = one.loss().detach()
    if isinstance(loss, shardwise.ShardedTensor):
        return float(loss.full_tensor())
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def sent_by_layer(one: Contender, shape: MixtureShape) -> dict[str, float]:
    """Bytes that leave all ranks in a forward and backward of a layer, and what tokens that change ranks take."""
    with shardwise.trace() as trace:
        one.layer()
    exchanges = [event for event in trace.events if event.kind == "exchange"]
    sent = torch.tensor([float(event.sent) for event in exchanges], dtype=torch.float64, device=device_here())
    dist.all_reduce(sent)
    ranks, row = dist.get_world_size(), shape.width * 4
    tokens = shape.batch * shape.sequence
    # The choices of `Contender.layer`, where experts lie in order.
    chosen = [[k * (3 * j + 1) % shape.experts for j in range(shape.choices)] for k in range(tokens)]
    apart = choices = 0
    for token, of_token in enumerate(chosen):
        own, there = token * ranks // tokens, [expert * ranks // shape.experts for expert in of_token]
        apart += len(set(there) - {own})
        choices += sum(rank != own for rank in there)
    return {
        "to the experts": sent[0].item(),
        "and back": sent[1].item(),
        "gradients to the experts": sent[2].item(),
        "and back again": sent[3].item(),
        "tokens that change ranks × width": apart * row,
        "choices of experts elsewhere × width, as DTensor sends": choices * row,
    }


def run(shape: MixtureShape = SHAPES["gloo"], backend: str = "gloo", ranks: int = 4, blocks: int = 5) -> list[Row]:
    """Measure on ranks of their own, and print what was found; gives what is held to a budget."""
    found, sent = run_on_ranks(ranks, measure, shape, blocks, timeout=550, fresh=True, backend=backend)[0]
    what = f"{shape.layers} layers of {shape.width}, {shape.experts} experts, {shape.choices} a token"
    print(f"\nExperts on ranks: {what}, batch {shape.batch} x {shape.sequence}, AdamW, {ranks} {backend} ranks\n")
    lines = [["", "a step", "beside DTensor", "processor", "beside DTensor", "a layer", "beside DTensor", "first loss"]]
    other: Found = found["DTensor"]
    for name, one in found.items():
        figures = []
        for part in ("step", "processor", "layer"):
            mine, theirs = getattr(one, part), getattr(other, part)
            figures += [duration(mine), f"{mine / theirs:.2f}x"]
        lines.append([name, *figures, f"{one.loss:.6f}"])
    print_lines(lines)
    print("\nBytes of all ranks in one layer; a row to the experts also has the weights and numbers of its experts\n")
    print_lines([["", "bytes"], *([name, f"{size:,.0f}"] for name, size in sent.items())])
    where = f"{ranks} {backend} ranks"
    steps, layers = (
        {name: getattr(found[name], part) for name in ("shardwise", "DTensor")} for part in ("step", "layer")
    )
    return [
        Row(f"experts on ranks, a step, {where}", steps, "≤ 1.0 DTensor", ("DTensor", 1.0)),
        Row(f"experts on ranks, one layer alone, {where}", layers),
    ]


def main() -> None:
    parser = parser_for(__doc__, SHAPES)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=5, help="of three steps each, of which the fastest counts")
    given = parser.parse_args()
    run(chosen_shape(given, SHAPES), given.backend, given.ranks, given.blocks)


if __name__ == "__main__":
    from benchmarks import experts  # as the ranks import it

    experts.main()
