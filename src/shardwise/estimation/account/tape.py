"""`Tape`: what one rank does in a step, in order: kernels, transfers that begin, and waits for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from shardwise.estimation.devices.device import Device, Rate

KINDS = {"all-gather": "gather", "reduce-scatter": "sum", "all-reduce": "sum", "exchange": "exchange"}


@dataclass(frozen=True, slots=True)
class Kernel:
    """An op on local tensors."""

    name: str
    module: str
    line: str
    calls: float  # what the host needs to start it, in usual calls of an op
    flops: int = 0  # of products
    bytes: int = 0  # read and written
    dtype: str = ""  # of products
    is_attention: bool = False  # whether this is fused attention
    is_step: bool = False  # whether this is of the step of an optimizer

    def seconds(self, device: Device) -> float:
        """How long a device computes."""
        if not self.flops:
            return device.copies.seconds(self.bytes) if self.bytes else 0.0
        rates = device.attention if self.is_attention else device.products
        return max(_rate(rates, self.dtype).seconds(self.flops), self.bytes / device.copies.per_second)


@dataclass(frozen=True, slots=True)
class Sending:
    """A transfer that begins."""

    name: str  # the op that needs it
    module: str
    line: str
    kind: str
    sent: int  # bytes
    received: int
    to: Mapping[int, int]  # by rank, the bytes of what is sent
    network: int  # bytes that this rank sends to other machines; in a collective, its share of what its machine sends

    def seconds(self, device: Device) -> float:
        """How long it takes: by the slower link."""
        what = KINDS.get(self.kind, "exchange")
        within = device.link("machine", what).seconds(max(self.sent, self.received))
        return max(within, device.link("network", what).seconds(self.network)) if self.network else within


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is computed next needs the result of a transfer."""

    number: int  # of the transfer, counted from 0


@dataclass
class Tape:
    """What one rank does. The device computes one kernel after another, while the host starts the next ones."""

    entries: list[Kernel | Sending | Arrival] = field(default_factory=list)
    sendings: list[Sending] = field(default_factory=list)

    def send(self, sending: Sending) -> int:
        """A transfer begins. Gives its number."""
        self.entries.append(sending)
        self.sendings.append(sending)
        return len(self.sendings) - 1

    @property
    def flops(self) -> int:
        """Floating point operations."""
        return sum(entry.flops for entry in self.entries if isinstance(entry, Kernel))


def _rate(rates: Mapping[str, Rate], dtype: str) -> Rate:
    """The rate for a dtype; of those without one, that of another float."""
    if dtype == "float32" and torch.get_float32_matmul_precision() != "highest" and "tf32" in rates:
        dtype = "tf32"
    return next(rates[known] for known in (dtype, "float32", "bfloat16", *rates) if known in rates)
