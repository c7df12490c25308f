"""On a GPU: how fast pieces are packed and unpacked, beside a device-to-device copy. `python -m benchmarks.gpu`."""

from __future__ import annotations

import torch

from shardwise.comm.transfer.views import copy

MIB = 512


def gigabytes_per_second(work: object, size: int) -> float:
    """Bytes read and written per second, best of several, by the GPU's own clock."""
    best = float("inf")
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(5):
            work()  # type: ignore[operator] # a function
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / 5 / 1e3)
    return 2 * size / best / 1e9


def main() -> None:
    """Copy, pack column slabs, unpack column slabs."""
    side = 1 << 14
    tensor = torch.rand(MIB * 2**18 // side, side, device="cuda")
    other, size = torch.empty_like(tensor), tensor.nbytes
    plain = gigabytes_per_second(lambda: other.copy_(tensor), size)
    print(f"device-to-device copy       {plain:8.0f} GB/s")
    for parts in (2, 4, 8):
        width = side // parts
        buffers = [torch.empty(tensor.shape[0], width, device="cuda") for _ in range(parts)]
        slabs = [tensor[:, k * width : (k + 1) * width] for k in range(parts)]

        def pack(buffers: list[torch.Tensor] = buffers, slabs: list[torch.Tensor] = slabs) -> None:
            for buffer, slab in zip(buffers, slabs, strict=True):
                copy(buffer, slab)

        def unpack(buffers: list[torch.Tensor] = buffers, slabs: list[torch.Tensor] = slabs) -> None:
            for buffer, slab in zip(buffers, slabs, strict=True):
                copy(slab, buffer)

        for name, work in (("pack", pack), ("unpack", unpack)):
            rate = gigabytes_per_second(work, size)
            print(f"{name:>6} {parts} column slabs      {rate:8.0f} GB/s  {rate / plain:5.0%} of the copy")


if __name__ == "__main__":
    main()
