"""`Ranks`: the ranks that save or load together."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.comm.agreement import in_step_sharing
from shardwise.comm.group import Fields, group_ranks, is_member, or_default, without_data
from shardwise.errors import CheckpointError, ProcessGroupError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The ranks of a group; one process alone where torch.distributed is not initialised."""

    group: ProcessGroup | None
    here: int  # this process, as a global rank
    all: tuple[int, ...]  # in group order
    verb: str  # the call, which must be the same on all ranks

    @staticmethod
    def of(process_group: ProcessGroup | None, verb: str) -> Ranks:
        """The ranks of this group, else of the default one, else this process."""
        if without_data():
            raise CheckpointError(f"{verb} needs values, and there are none within FakeTensorMode: call it outside")
        if process_group is None and not (dist.is_available() and dist.is_initialized()):
            return Ranks(None, 0, (0,), verb)
        group = or_default(process_group)
        if not is_member(group):
            raise ProcessGroupError(f"rank {dist.get_rank()} is not in the given group: only its ranks call {verb}")
        return Ranks(group, dist.get_rank(), tuple(group_ranks(group)), verb)

    @property
    def first(self) -> bool:
        """Whether this is the first rank, which does what only one must do."""
        return self.here == self.all[0]

    def hosts(self) -> int:
        """The number of hosts. Every rank calls this."""
        return len(set(self.in_step(lambda: (None, {}, socket.gethostname()))[1]))

    def in_step(self, work: Callable[[], tuple[T, Fields, Any]]) -> tuple[T, list[Any]]:
        """Run ``work`` on every rank; return this rank's value and what each rank shares, in group order.

        Raises on every rank if it fails on one.
        """
        if self.group is None:
            value, _, shared = work()
            return value, [shared]

        def named() -> tuple[T, Fields, Any]:
            value, fields, shared = work()
            return value, {"verb": self.verb, **fields}, shared

        return in_step_sharing(self.group, named, subject="the state's")

    def together(self, work: Callable[[], object]) -> None:
        """Run ``work`` on every rank; raise on every rank if it fails on one."""

        def run() -> tuple[None, Fields, None]:
            work()
            return None, {}, None

        self.in_step(run)
