"""`PlannedTransfer`: what a rank knows of all transfers by one plan in a group, before there are tensors."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from functools import cached_property

import torch
from torch.distributed import ProcessGroup

from shardwise.comm.group import DIGEST, CallFingerprint, cached_per_group, is_fake, is_tagged, own_rank, rank_array
from shardwise.comm.transfer.messages import Messages, messages_received, messages_sent
from shardwise.comm.transfer.plan import TransferPlan
from shardwise.comm.transfer.wire import wire_device

MOST_SAID = 16  # ways to carry out one plan that are kept


def _unknown() -> Messages | None:
    """No messages have been made yet."""
    return None


class PlannedTransfer:
    """A plan and a dtype in a group; and the messages, as long as the pieces of the plan are kept."""

    def __init__(self, group: ProcessGroup, plan: TransferPlan, dtype: torch.dtype) -> None:
        self.group, self.plan, self.dtype = group, plan, dtype
        self.rank, self.is_fake, self.is_tagged = own_rank(group), is_fake(group), is_tagged(group)
        self._said: dict[tuple[int | None, str], CallFingerprint] = {}
        self._sent: Callable[[], Messages | None] = _unknown
        self._due: Callable[[], Messages | None] = _unknown

    @property
    def sent(self) -> Messages:
        """What this rank sends."""
        found = self._sent()
        if found is None:
            found = messages_sent(self.plan, self.rank, rank_array(self.group))
            self._sent = weakref.ref(found)
        return found

    @property
    def due(self) -> Messages:
        """What this rank gets."""
        found = self._due()
        if found is None:
            found = messages_received(self.plan, self.rank, rank_array(self.group))
            self._due = weakref.ref(found)
        return found

    @property
    def wire(self) -> torch.device:
        """Where buffers lie to be sent; of an accelerator, the current device."""
        return self._cpu or wire_device(self.plan.device_types, self.group)

    @cached_property
    def _cpu(self) -> torch.device | None:
        found = wire_device(self.plan.device_types, self.group)
        return found if found.type == "cpu" else None

    def made(self) -> list[torch.Tensor]:
        """New local tensors for this rank's boxes of the destination."""
        return [torch.empty(size, dtype=self.dtype, device=device) for size, device in self._boxes]

    @cached_property
    def _boxes(self) -> list[tuple[list[int], torch.device]]:
        layout = self.plan.dst
        return [(layout.extent(row), layout.place(row).device) for row in layout.rows_on(self.rank)]

    def said(self, max_bytes: int | None, verb: str) -> CallFingerprint:
        """What all ranks must say alike of a transfer."""
        found = self._said.get((max_bytes, verb))
        if found is None:
            if len(self._said) >= MOST_SAID:
                self._said.clear()
            found = self._said[max_bytes, verb] = _said(self.plan, self.dtype, max_bytes, verb)
        return found


def _said(plan: TransferPlan, dtype: torch.dtype, max_bytes: int | None, verb: str) -> CallFingerprint:
    def fields() -> dict[str, object]:
        named = {"verb": verb, "from": plan.src.outline, "to": plan.dst.outline, "dtype": dtype}
        return {**named, "sums": plan.sums, "max_bytes": max_bytes}

    rest = f"{plan.sums} {dtype} {max_bytes} {verb}".encode()
    return CallFingerprint(
        fields, hashlib.blake2b(plan.src.digest + plan.dst.digest + rest, digest_size=DIGEST).digest()
    )


@cached_per_group(512)
def planned_transfer(group: ProcessGroup, plan: TransferPlan, dtype: torch.dtype) -> PlannedTransfer:
    """What is known of transfers by a plan in a group that this rank belongs to."""
    return PlannedTransfer(group, plan, dtype)
