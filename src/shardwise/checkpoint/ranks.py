"""`Ranks`: who saves or loads together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.errors import ProcessGroupError
from shardwise.process_group import Fields, group_ranks, in_step_sharing, is_member, or_default

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The ranks of a group; one process alone where torch.distributed is not initialised."""

    group: ProcessGroup | None
    here: int  # this process, as a global rank
    all: tuple[int, ...]  # in group order

    @staticmethod
    def of(process_group: ProcessGroup | None) -> Ranks:
        """The ranks of this group, else of the default one, else this process."""
        if process_group is None and not (dist.is_available() and dist.is_initialized()):
            return Ranks(None, 0, (0,))
        group = or_default(process_group)
        if not is_member(group):
            raise ProcessGroupError(f"rank {dist.get_rank()} is not in the given group: only its ranks save and load")
        return Ranks(group, dist.get_rank(), tuple(group_ranks(group)))

    @property
    def first(self) -> bool:
        """Whether this rank does what only one must do."""
        return self.here == self.all[0]

    def in_step(self, work: Callable[[], tuple[T, Fields, Any]]) -> tuple[T, list[Any]]:
        """Do this rank's part; return only if it went well on all, with what each brought, in group order."""
        if self.group is None:
            value, _, brought = work()
            return value, [brought]
        return in_step_sharing(self.group, work, subject="the state's")
