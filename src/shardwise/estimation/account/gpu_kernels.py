"""Kernels that torch has for GPUs alone, for fake tensors of the CPU that stand for those of a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch

from shardwise.estimation.devices.device import Device
from shardwise.tensor.dispatch import Distributed


def gpu_kernels_of(device: Device) -> Any:
    """Within this context, torch takes the kernels that it has for such a device."""
    return nullcontext() if device.kind == "cpu" else _gpu_kernels()


@contextmanager
def _gpu_kernels() -> Iterator[None]:
    """Optimizers step all parameters at once, and `rms_norm` is one kernel that keeps its argument alone."""
    optimizers: Any = import_module("torch.optim.optimizer")  # an attribute of torch.optim it is not
    devices, norm = optimizers._get_foreach_kernels_supported_devices, torch.rms_norm

    def rms_norm(
        input: torch.Tensor,
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        if isinstance(input, Distributed) or isinstance(weight, Distributed):
            return norm(input, normalized_shape, weight, eps)
        # The norm of layers, which has the same arguments, results and saved tensors, but for the means.
        return torch.native_layer_norm(input, normalized_shape, weight, None, 0.0)[0]

    optimizers._get_foreach_kernels_supported_devices = lambda: [*devices(), "cpu"]
    torch.rms_norm = rms_norm  # type: ignore[assignment] # it has whole sizes
    try:
        yield
    finally:
        optimizers._get_foreach_kernels_supported_devices = devices
        torch.rms_norm = norm


# Sums over other dims than the last -----------------------------------------------------------------------------------

THREADS = 132 * 2048  # that run at once on a large GPU
SUMS = {"sum", "mean"}


def scratch_of(name: str, args: Any, out: Any) -> int:
    """Bytes that a kernel for GPUs allocates for itself, and frees when it is done.

    For a sum over rows, several blocks of threads share the rows of a column, and meet in memory. How many there are
    follows what torch chooses: as many values as a thread should have, and as many blocks as run at once.
    """
    if name not in SUMS or not isinstance(out, torch.Tensor) or len(args) < 2:
        return 0
    given, dims = args[0], args[1]
    if not dims or given.ndim < 2 or not given.numel() or given.ndim - 1 in {dim % given.ndim for dim in dims}:
        return 0
    columns, rows = out.numel(), given.numel() // out.numel()
    wide = 8 if given.dtype in (torch.float64, torch.int64) else 4
    vector = 4 if columns >= 128 and columns % 4 == 0 else 1
    most = (256 if wide == 8 else 512) // vector
    width = min(_power(columns // vector, most), 32)
    height = min(_power(rows, most), most // width)
    if rows < 16 * height and rows < 256:
        return 0
    values = -(-rows // height)
    grid = -(-columns // (vector * width))
    room = THREADS // (width * height)
    if values < 256 or grid > room:
        return 0
    blocks = max(min(-(-room // grid), -(-values // 16)), -(-values // 256))
    return wide * columns * blocks * width * vector if blocks > 1 else 0


def _power(number: int, most: int) -> int:
    """The largest power of two up to a number, and up to the most."""
    return most if number >= most else 1 << (number.bit_length() - 1)
