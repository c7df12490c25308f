"""`TABLE`: usual devices by name, from the data sheets of their vendors.

Peaks are those of dense matrices, without sparsity, with sums in float32 where a sheet tells them apart. A job does not
reach a peak: `PRODUCTS` and the other fractions say which part of it is taken for reachable. ``shardwise doctor
--measure`` replaces the guess by a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.estimation.devices.device import Device, Rate

PRODUCTS = 0.70  # of the peak, by large matrix products
ATTENTION = 0.45  # of the peak of products, by fused attention, forward and backward
COPIES = 0.85  # of the memory's bandwidth
LINKS = 0.80  # of a link's bandwidth

KERNEL = 4e-6  # seconds before a kernel computes
CALL = 7e-6  # seconds of the host for one op
COLLECTIVE = {"machine": 25e-6, "network": 40e-6}  # seconds before a collective moves data
BLOCK = 512  # bytes: the CUDA allocator rounds up to them
RUNTIME = 2**30  # bytes that the driver and NCCL take of what the driver reports
GIB, TERA, GIGA = 2**30, 1e12, 1e9

DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8")
FUSED = ("float32", "bfloat16", "float16")  # dtypes of fused attention


@dataclass(frozen=True)
class _Sheet:
    """What a data sheet says of an accelerator."""

    memory: float  # GiB that the driver reports
    peaks: tuple[float, ...]  # TFLOP/s of products, by `DTYPES`; 0: not supported
    bandwidth: float  # GB/s of its memory
    machine: float  # GB/s in one direction to others of the machine: NVLink, Infinity Fabric or PCIe
    network: float  # GB/s of its part of the network cards: 50 is a card of 400 Gb/s
    per_machine: int
    workspace: float = 8.125  # MiB that cuBLAS keeps for a thread: one computes forwards, another one backwards

    def device(self, name: str) -> Device:
        peaks = {dtype: peak * TERA for dtype, peak in zip(DTYPES, self.peaks, strict=True) if peak}
        speeds = {"machine": self.machine, "network": self.network}
        return Device(
            name=name,
            kind="cuda",
            memory=int(self.memory * GIB) - RUNTIME,
            products={dtype: Rate(peak * PRODUCTS, KERNEL) for dtype, peak in peaks.items()},
            attention={dtype: Rate(peaks[dtype] * ATTENTION, KERNEL) for dtype in FUSED if dtype in peaks},
            copies=Rate(self.bandwidth * GIGA * COPIES, KERNEL),
            call=CALL,
            links={where: Rate(speed * GIGA * LINKS, COLLECTIVE[where]) for where, speed in speeds.items()},
            per_machine=self.per_machine,
            reserved=int(2 * self.workspace * 2**20),
            block=BLOCK,
        )


# NVIDIA: data sheets of each product; GeForce: the white papers of Ampere, Ada and Blackwell. AMD: data sheets of
# Instinct. MI250X is one of the two dies of a card, which PyTorch takes for a device each.
_SHEETS = {
    # memory, (float64, float32, tf32, bfloat16, float16, float8), bandwidth, machine, network, per_machine, workspace
    "V100-16GB": _Sheet(15.8, (7.8, 15.7, 0, 0, 125, 0), 900, 150, 12.5, 8),
    "V100-32GB": _Sheet(31.7, (7.8, 15.7, 0, 0, 125, 0), 900, 150, 12.5, 8),
    "T4": _Sheet(14.6, (0.25, 8.1, 0, 0, 65, 0), 320, 16, 3, 4),
    "RTX3090": _Sheet(23.7, (0.56, 35.6, 35.6, 71, 71, 0), 936, 25, 1.25, 4),
    "RTX4090": _Sheet(23.6, (1.29, 82.6, 82.6, 165.2, 165.2, 330.3), 1008, 25, 1.25, 4),
    "RTX5090": _Sheet(31.4, (1.64, 104.8, 104.8, 209.5, 209.5, 419), 1792, 50, 1.25, 4),
    "A10": _Sheet(22.0, (0.98, 31.2, 62.5, 125, 125, 0), 600, 25, 6.25, 4),
    "A10G": _Sheet(22.0, (1.09, 35, 35, 70, 70, 0), 600, 25, 6.25, 4),
    "L4": _Sheet(22.0, (0.47, 30.3, 60, 121, 121, 242.5), 300, 25, 6.25, 8),
    "L40S": _Sheet(44.4, (1.43, 91.6, 183, 362, 362, 733), 864, 25, 12.5, 8),
    "A100-40GB": _Sheet(39.4, (19.5, 19.5, 156, 312, 312, 0), 1555, 300, 25, 8),
    "A100-80GB": _Sheet(79.2, (19.5, 19.5, 156, 312, 312, 0), 2039, 300, 25, 8),
    "H100-80GB": _Sheet(79.2, (67, 67, 494, 989, 989, 1979), 3350, 450, 50, 8, 32),
    "H100-PCIe": _Sheet(79.2, (51, 51, 378, 756, 756, 1513), 2000, 50, 25, 8, 32),
    "H200-141GB": _Sheet(139.8, (67, 67, 494, 989, 989, 1979), 4800, 450, 50, 8, 32),
    "GH200-96GB": _Sheet(94.5, (67, 67, 494, 989, 989, 1979), 4000, 450, 50, 1, 32),
    "B200-192GB": _Sheet(178.3, (37, 75, 1100, 2250, 2250, 4500), 8000, 900, 50, 8, 32),
    "MI250X": _Sheet(64.0, (47.9, 47.9, 0, 191.5, 191.5, 0), 1638, 50, 25, 8, 32),
    "MI300X-192GB": _Sheet(192.0, (163.4, 163.4, 653.7, 1307.4, 1307.4, 2614.9), 5300, 448, 50, 8, 32),
}

# One core of a server at 2.5 GHz with AVX-512, without instructions for bfloat16 and float16: a rank has one, unless a
# job asks for more. It sends by gloo, through sockets. Starts, and what no sheet tells, are as measured on such a one.
_CPU_PEAKS = {"float64": 80, "float32": 160, "bfloat16": 40, "float16": 1.6}  # GFLOP/s
_CPU_STARTS = {"float32": 1.5e-4, "bfloat16": 7e-4, "float16": 3e-4}  # seconds, of attention
_CPU = Device(
    name="CPU",
    kind="cpu",
    memory=8 * GIB,
    products={name: Rate(peak * GIGA * PRODUCTS, 4e-6) for name, peak in _CPU_PEAKS.items()},
    attention={name: Rate(_CPU_PEAKS[name] * GIGA * ATTENTION, start) for name, start in _CPU_STARTS.items()},
    copies=Rate(12 * GIGA, 5e-6),
    call=6e-6,
    links={"machine": Rate(0.8 * GIGA, 5e-4), "network": Rate(0.8 * GIGA, 6e-4)},
    per_machine=8,
)

TABLE = {**{name: sheet.device(name) for name, sheet in _SHEETS.items()}, _CPU.name: _CPU}
