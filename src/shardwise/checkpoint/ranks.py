"""`Ranks`: who saves or loads together."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.errors import CheckpointError, ProcessGroupError
from shardwise.process_group import Fields, group_ranks, in_step_sharing, is_member, or_default, without_data

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The ranks of a group; one process alone where torch.distributed is not initialised."""

    group: ProcessGroup | None
    here: int  # this process, as a global rank
    all: tuple[int, ...]  # in group order
    verb: str  # what they do, which must be the same on all of them

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
        """Whether this rank does what only one must do."""
        return self.here == self.all[0]

    def hosts(self) -> int:
        """On how many hosts they are. Every rank calls it."""
        return len(set(self.in_step(lambda: (None, {}, socket.gethostname()))[1]))

    def in_step(self, work: Callable[[], tuple[T, Fields, Any]]) -> tuple[T, list[Any]]:
        """Do this rank's part; return only if it went well on all, with what each brought, in group order."""
        if self.group is None:
            value, _, brought = work()
            return value, [brought]

        def named() -> tuple[T, Fields, Any]:
            value, fields, brought = work()
            return value, {"verb": self.verb, **fields}, brought

        return in_step_sharing(self.group, named, subject="the state's")
