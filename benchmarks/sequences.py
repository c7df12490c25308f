"""Sequences in pieces: `python -m benchmarks.sequences --help`.

A step of a model like Llama with AdamW on one long sequence, causal, in two pieces on each of four ranks, and in one
piece. Beside it runs torch's own context parallel: its ring attention in two pieces, DistributedDataParallel for the
gradients. Torch dispatches its ring for kernels of CUDA only, so on gloo it is called with the kernel for CPUs, the
same one that shardwise calls. All take turns in one run. `--backend nccl` takes CUDA's kernels, bfloat16 and a larger
model. Measured beside are the peak of memory of a rank and that of the whole sequence on one rank, of a Llama of
transformers whose sequence no number of ranks divides, and how far its gradients are from the whole one's in float64.
"""

from __future__ import annotations

import copy
import ctypes
import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _templated_ring_attention,
    _templated_ring_attention_backward,
)
from torch.nn.parallel import DistributedDataParallel

import shardwise
from benchmarks.fully_sharded import device_here, synchronised
from benchmarks.llama import Llama, Shape, loss_of
from benchmarks.shape_options import chosen_shape, parser_for
from benchmarks.table import Row, duration
from benchmarks.timing import both_together
from benchmarks.transfers import status
from shardwise.testing import run_on_ranks

SHAPES = {
    "gloo": Shape(layers=2, width=256, batch=1, sequence=4096),
    "nccl": Shape(layers=2, width=1024, batch=1, sequence=16384),
}
LENGTH, WORDS = 4099, 4096
MIB = 2**20
aten = torch.ops.aten


# Torch's ring --------------------------------------------------------------------------------------------------------


def _flash(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, **options)


def _flash_backward(query: Any = None, key: Any = None, value: Any = None, **given: Any) -> Any:
    out, lse = given["out"], given["logsumexp"]
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        given["grad_out"], query, key, value, out, lse, 0.0, given["is_causal"]
    )


class Ring(torch.autograd.Function):
    """Torch's ring attention, forward and backward, over the default group."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """By the flash kernel of the device."""
        group: Any = dist.group.WORLD
        kernel = aten._scaled_dot_product_flash_attention if query.is_cuda else _flash
        out, lse, *rest = _templated_ring_attention(group, 2, kernel, query, key, value, is_causal=True)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.rest = rest
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """By the flash kernel of the device."""
        query, key, value, out, lse = ctx.saved_tensors
        group: Any = dist.group.WORLD
        kernel: Any = _flash_backward
        more: dict[str, Any] = {}
        if query.is_cuda:
            kernel = aten._scaled_dot_product_flash_attention_backward.default
            names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
            more = {"dropout_p": 0.0, **dict(zip(names, ctx.rest, strict=False))}
        return _templated_ring_attention_backward(
            group, 2, kernel, grads[0], "grad_out", query, key, value, out, lse, is_causal=True, **more
        )[:3]


def _attend(self: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """As `benchmarks.llama.Attention.forward`, with torch's ring."""
    q, k, v = (self._heads(part(x)) for part in (self.q, self.k, self.v))
    q, k = (part * cos + _turned(part) * sin for part in (q, k))
    out: Any = Ring.apply(q, k, v)
    return self.o(out.transpose(1, 2).flatten(2))


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


# Contenders ----------------------------------------------------------------------------------------------------------


def start(shape: Shape) -> Any:
    torch.manual_seed(0)
    model = Llama(shape)
    return model.to(device_here(), torch.bfloat16) if device_here().type == "cuda" else model


def tokens(shape: Shape) -> tuple[Tensor, Tensor]:
    size = (2, shape.batch, shape.sequence)
    ids, labels = torch.randint(shape.words, size, generator=torch.Generator().manual_seed(1)).to(device_here())
    return ids, labels


def stepping(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(shape: Shape, pieces: int = 2) -> Callable[[], None]:
    plan = shardwise.plans.context_parallel(parameters=None, pieces=pieces)
    model = shardwise.shard_module(start(shape), plan)
    ids, labels = plan.cut(tokens(shape))
    return stepping(model, lambda: loss_of(model, ids, labels))


def theirs(shape: Shape) -> Callable[[], None]:
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = torch.arange(shape.sequence, device=device_here()).chunk(2 * world)
    mine = torch.cat([chunks[rank], chunks[2 * world - 1 - rank]])  # the first and the last, as torch's ring has them
    model = start(shape)
    model.cos, model.sin = model.cos[mine], model.sin[mine]
    for block in model.blocks:
        block.attention.forward = _attend.__get__(block.attention)
    ids, labels = (one[:, mine].clone() for one in tokens(shape))
    copies = DistributedDataParallel(model)
    return stepping(copies, lambda: loss_of(copies, ids, labels))


def measure(shape: Shape, blocks: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a step, and of the processors of all ranks, on every rank."""
    torch.set_num_threads(1)
    made = {"shardwise": ours(shape), "one piece": ours(shape, 1), "torch": theirs(shape)}
    contenders = {name: partial(synchronised, step) for name, step in made.items()}
    for step in contenders.values():
        for _ in range(3):
            step()
    return both_together(contenders, repeats=blocks)


# A Llama of transformers ---------------------------------------------------------------------------------------------


def llama(width: int = 256) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


def llama_step(in_pieces: bool, width: int, length: int) -> Callable[[], None]:
    model, ids = llama(width), torch.randint(WORDS, (1, length), generator=torch.Generator().manual_seed(1))
    inputs: Any = {"input_ids": ids, "labels": ids}
    if in_pieces:
        plan = shardwise.plans.context_parallel()
        shardwise.shard_module(model, plan)
        inputs = plan.cut(inputs)
    return stepping(model, lambda: model(**inputs, use_cache=False).loss)


def peak_of(in_pieces: bool) -> float:
    """MiB by which the memory of this process peaks in a step, above what it had before there was the model."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 17)  # memory of tensors is given back at once: the peak is that of what lives
    for _ in range(2):
        llama_step(in_pieces, 32, 64)()  # all code is loaded
    gc.collect()
    libc.malloc_trim(0)
    before = status("VmRSS")
    step = llama_step(in_pieces, 256, LENGTH)
    step()
    gc.collect()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    step()
    return (status("VmHWM") - before) / 1024


def difference() -> float:
    """The largest difference of a gradient from the whole model's, beside the largest gradient; in float64."""
    plain = llama().double()
    for layer in plain.model.layers[1:]:
        layer.requires_grad_(False)
    ids = torch.randint(WORDS, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    plan = shardwise.plans.context_parallel()
    model = shardwise.shard_module(copy.deepcopy(plain), plan)
    model(**plan.cut({"input_ids": ids, "labels": ids})).loss.backward()
    plain(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    worst = largest = 0.0
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            largest = max(largest, float(other.grad.abs().max()))
            worst = max(worst, float((one.grad.full_tensor() - other.grad).abs().max()))
    return worst / largest


def peak_on_gpu(shape: Shape, in_pieces: bool) -> float:
    """MiB of CUDA's allocator at the peak of a step."""
    step = ours(shape) if in_pieces else whole(shape)
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() / MIB


def whole(shape: Shape) -> Callable[[], None]:
    model = start(shape)
    ids, labels = tokens(shape)
    return stepping(model, lambda: loss_of(model, ids, labels))


def run(shape: Shape = SHAPES["gloo"], ranks: int = 4, blocks: int = 7, backend: str = "gloo") -> list[Row]:
    """Measure on ranks of their own, and print what was found; gives what is held to a budget."""
    seconds, spent = run_on_ranks(ranks, measure, shape, blocks, timeout=550, fresh=True, backend=backend)[0]
    what = f"{shape.layers} layers of {shape.width}, {shape.batch} x {shape.sequence} tokens, {ranks} {backend} ranks"
    print(f"\nSequences in pieces: {what}\n")
    for what, found in {"a step": seconds, "time of all processors": spent}.items():
        shown = [f"{name} {duration(one)} ({one / found['torch']:.2f}x torch's ring)" for name, one in found.items()]
        print(f"  {what}: " + ", ".join(shown))
    step = Row(f"step on a sequence in pieces, {ranks} {backend} ranks", seconds, "≤ 1.0 torch", ("torch", 1.0))
    if backend == "nccl":
        odd = replace(shape, sequence=shape.sequence + 3)
        pieces = max(run_on_ranks(ranks, peak_on_gpu, odd, True, timeout=300, fresh=True, backend=backend))
        one = run_on_ranks(1, peak_on_gpu, odd, False, timeout=300, fresh=True, backend=backend)[0]
        print(f"  {odd.sequence} tokens: the most of a rank {pieces:.0f} MiB, whole {one:.0f} MiB; {pieces / one:.2f}x")
        return [step]
    pieces = max(run_on_ranks(ranks, peak_of, True, timeout=300, fresh=True))
    one = run_on_ranks(1, peak_of, False, timeout=300, fresh=True)[0]
    print(
        f"  Llama of transformers, {LENGTH} tokens, AdamW: the most of a rank {pieces:.0f} MiB, whole {one:.0f} MiB",
        end="",
    )
    print(f"; {pieces / one:.2f}x")
    off = max(run_on_ranks(ranks, difference, timeout=550, fresh=True))
    print(f"  its gradients in float64: {off:.1e} of the largest off")
    return [
        step,
        Row("MiB of a rank at its peak", {"shardwise": pieces, "whole": one}, "≤ 0.35 whole", ("whole", 0.35)),
    ]


def main() -> None:
    parser = parser_for(__doc__, SHAPES)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=7, help="steps, of which the fastest counts")
    given = parser.parse_args()
    run(chosen_shape(given, SHAPES), given.ranks, given.blocks, given.backend)


if __name__ == "__main__":
    from benchmarks import sequences  # as the ranks import it

    sequences.main()
