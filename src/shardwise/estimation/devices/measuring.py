"""`measure`: what one rank of a group finds out about its device, while all the other ranks do the same.

Ranks share the cores, the memory's bandwidth and the links of their machine, in training as here. So they measure at
the same time, and wait for each other between calls of different sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from shardwise.estimation.devices.fitting import Points
from shardwise.estimation.devices.measuring_links import time_links
from shardwise.estimation.devices.own_device import (
    device_name,
    product,
    product_dtypes,
    product_precision,
    usable_memory,
    workspace,
)
from shardwise.estimation.devices.table import DTYPES, FUSED
from shardwise.estimation.devices.timing import Call, Stopwatch
from shardwise.torch_private import TorchDispatchMode

SLOW = 0.06  # seconds: after a call that takes as long, no larger one is timed


@dataclass(frozen=True)
class Sizes:
    """What is timed, from small to large, and how often."""

    products: Sequence[tuple[int, int, int]]  # rows of a batch, inputs and outputs of a layer
    attention: Sequence[tuple[int, int, int, int]]  # samples, heads, length, size of a head
    copies: Sequence[int]  # bytes of a tensor
    links: Sequence[int]  # bytes that all ranks have together
    repeats: int = 7


CPU_SIZES = Sizes(
    products=[(16, 64, 64), (64, 128, 128), (128, 256, 256), (256, 256, 1024), (512, 512, 512), (512, 512, 2048)],
    attention=[(1, 4, length, 64) for length in (32, 64, 128, 256, 512, 1024)],
    copies=[2**power for power in (14, 16, 18, 20, 22, 24, 25)],
    links=[2**power for power in (12, 14, 16, 18, 20, 22, 24)],
)
CUDA_SIZES = Sizes(
    products=[(512, 512, 512), (1024, 1024, 1024), (2048, 1024, 4096), (4096, 4096, 4096), (8192, 8192, 8192)],
    attention=[(2, 16, length, 128) for length in (256, 512, 1024, 2048, 4096)],
    copies=[2**power for power in (18, 20, 22, 24, 26, 28, 30)],
    links=[2**power for power in (14, 16, 18, 20, 22, 24, 26, 28)],
)


@dataclass(frozen=True)
class Measurement:
    """What one rank has measured: amounts and their seconds."""

    name: str  # of the device
    kind: str
    number: int  # of the GPU in its machine; 0 for a CPU, which all ranks share
    memory: int  # bytes that the ranks on this device may use together
    reserved: int
    threads: int  # of this rank, on the CPU
    call: float
    products: dict[str, Points]
    attention: dict[str, Points]
    copies: Points
    links: dict[str, Points] = field(default_factory=dict)  # "gather", "sum", "exchange"; of a single rank, none


def measure(kind: str, sizes: Sizes | None = None) -> Measurement:
    """Measure this rank's GPU, or its part of the CPU. All ranks of the default group call it."""
    with torch.random.fork_rng(), torch.enable_grad():
        return _measure(kind, sizes)


def _measure(kind: str, sizes: Sizes | None) -> Measurement:
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    sizes = sizes or (CUDA_SIZES if kind == "cuda" else CPU_SIZES)
    memory, reserved = usable_memory(device), workspace(device)
    watch = Stopwatch(device, sizes.repeats)
    products: dict[str, Points] = {}
    attention: dict[str, Points] = {}
    known = product_dtypes(device)
    for name in DTYPES:  # all of them on every rank, for ranks wait for each other and may have different GPUs
        with product_precision(name):
            products[name] = _time_products(watch, sizes, known.get(name))
        if name in FUSED:
            attention[name] = _time_attention(watch, sizes, known.get(name))
    copies = _time_copies(watch, sizes)
    return Measurement(
        name=device_name(device),
        kind=kind,
        number=device.index or 0,
        memory=memory,
        reserved=reserved,
        threads=torch.get_num_threads(),
        call=_time_call(watch),
        products={name: points for name, points in products.items() if points},
        attention={name: points for name, points in attention.items() if points},
        copies=copies,
        links=time_links(watch, sizes.links, SLOW) if dist.get_world_size() > 1 else {},
    )


def _time_products(watch: Stopwatch, sizes: Sizes, dtype: torch.dtype | None) -> Points:
    """FLOP of products such as those of linear layers."""

    def linear(rows: int, inputs: int, outputs: int) -> tuple[float, Call | None]:
        flop = 2.0 * rows * inputs * outputs
        if dtype is None:
            return flop, None
        x, w = torch.randn(rows, inputs, device=watch.device), torch.randn(inputs, outputs, device=watch.device)
        return flop, product(x, w, dtype)

    return _points(watch, (linear(*size) for size in sizes.products))


def _time_attention(watch: Stopwatch, sizes: Sizes, dtype: torch.dtype | None) -> Points:
    """FLOP of fused attention with all scores, averaged over a forward (2 products) and its backward (5)."""

    def attention(*size: int) -> tuple[float, Call | None]:
        samples, heads, length, width = size
        flop = 14.0 * samples * heads * length * length * width
        if dtype is None:
            return flop, None
        q, k, v = (torch.randn(size, device=watch.device).to(dtype).requires_grad_() for _ in range(3))
        grad = torch.ones_like(q)

        def both() -> object:
            result = functional.scaled_dot_product_attention(q, k, v)
            return torch.autograd.grad(result, (q, k, v), grad)

        return flop, both

    both = _points(watch, (attention(*size) for size in sizes.attention))
    return [(flop / 2, seconds / 2) for flop, seconds in both]


def _time_copies(watch: Stopwatch, sizes: Sizes) -> Points:
    """Bytes read and written by ops that compute little: one that makes a new tensor, then one in place.

    Each takes the next one of many tensors, for in a step a cache rarely holds what an op is given.
    """

    def both(size: int) -> tuple[float, Call]:
        count = max(2, max(sizes.copies) // size)
        tensors = itertools.cycle([torch.ones(size // 4, device=watch.device) for _ in range(count)])

        def call() -> object:
            return next(tensors).mul(2.0), next(tensors).mul_(1.0)

        return 4.0 * size, call

    return [(amount / 2, seconds / 2) for amount, seconds in _points(watch, (both(size) for size in sizes.copies))]


def _time_call(watch: Stopwatch) -> float:
    """Seconds of the host for an op, of those that a training step of small layers makes."""
    with torch.device(watch.device):
        layers, x = [nn.LayerNorm(8), *(nn.Linear(8, 8) for _ in range(4)), nn.LayerNorm(8)], torch.ones(2, 8)
        model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    ops = _Ops()  # type: ignore[no-untyped-call] # torch's
    with ops:
        step()
    return watch.on_host(step) / ops.count


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's
    """Counts the ops that are called."""

    count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _nothing() -> None:
    """What a rank does while others make a call that its device cannot make."""


def _points(watch: Stopwatch, calls: Iterable[tuple[float, Call | None]]) -> Points:
    """An amount and its seconds for each call, which all ranks time at once, until it is slow for one of them.

    None is a call that this rank's device cannot make, but those of other ranks may.
    """
    points: list[tuple[float, float]] = []
    for amount, call in calls:
        seconds = watch.on_device(call or _nothing)
        if call is not None:
            points.append((amount, seconds))
        if watch.slowest([seconds])[0] > SLOW:  # the same on every rank
            break
    return points
