"""The device of this rank: its name, its memory, and the dtypes that it multiplies."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.nn import functional

CGROUP = Path("/sys/fs/cgroup/memory.max")  # of a container
FLOAT8 = torch.float8_e4m3fn


def device_name(device: torch.device) -> str:
    """What the vendor calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "CPU"


def usable_memory(device: torch.device) -> int:
    """Bytes of memory that a job may use now: free memory of a GPU, or all that this process may have of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no container, or "max"
        here = min(here, int(CGROUP.read_text()))
    return here


def workspace(device: torch.device) -> int:
    """Bytes that the allocator holds for the libraries that multiply, after a first forward and backward."""
    if device.type != "cuda":
        return 0
    before = torch.cuda.memory_allocated(device)
    torch.autograd.backward(functional.linear(*_small(device)).sum())
    torch.cuda.synchronize(device)
    return int(torch.cuda.memory_allocated(device)) - before


def _small(device: torch.device) -> list[torch.Tensor]:
    return [torch.ones(256, 256, device=device, requires_grad=True) for _ in range(2)]


def product_dtypes(device: torch.device) -> dict[str, torch.dtype]:
    """The dtypes of products that a GPU has instructions for, or that torch multiplies on a CPU."""
    found = {"float64": torch.float64, "float32": torch.float32}
    if device.type == "cpu":
        return {**found, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0):
        found["tf32"] = torch.float32
    if torch.cuda.is_bf16_supported(including_emulation=False):
        found["bfloat16"] = torch.bfloat16
    found["float16"] = torch.float16
    if _multiplies_float8(device):
        found["float8"] = FLOAT8
    return found


@contextmanager
def product_precision(name: str) -> Iterator[None]:
    """Products of float32 in tf32, if that is the name; else as they are."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    if name == "tf32":
        settings.fp32_precision = "tf32"
    try:
        yield
    finally:
        if name == "tf32":
            settings.fp32_precision = before


def product(x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """The product of two matrices in this dtype, to be called; float8 takes scales, and gives bfloat16."""
    if dtype is not FLOAT8:
        a, b = x.to(dtype), w.to(dtype)
        return lambda: torch.mm(a, b)
    a, b = x.to(dtype), w.t().contiguous().to(dtype).t()  # the second one by columns, as the kernels want it
    one, whole = torch.ones((), device=x.device), functional.ScalingType.TensorWise
    return lambda: functional.scaled_mm(a, b, one, whole, one, whole, output_dtype=torch.bfloat16)


def _multiplies_float8(device: torch.device) -> bool:
    small = torch.ones(64, 64, device=device)
    try:
        product(small, small, FLOAT8)()
    except (AttributeError, RuntimeError):  # this torch or this device has no such product
        return False
    return True
