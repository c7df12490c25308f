"""Which group is meant, who is in it, and whether there is anybody to talk to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise import settings
from shardwise.comm.group.state import cached_per_group
from shardwise.errors import ProcessGroupError
from shardwise.layout.geometry import IntArray, read_only
from shardwise.torch_private import FAKE_MODE, dispatch_mode

SHOWN = 8  # ranks that an error names, of many


@contextmanager
def load_with_process_group(process_group: ProcessGroup) -> Iterator[ProcessGroup]:
    """Within this context, sharded tensors are unpickled onto this group instead of the default one."""
    if settings.current().process_group is not None:
        raise ProcessGroupError('ProcessGroup already set by previous "load_with_process_group" context manager')
    with settings.changed(process_group=process_group):
        yield process_group


def current_process_group() -> ProcessGroup:
    """The group of the innermost `load_with_process_group`, else the default group."""
    return or_default(settings.current().process_group)


def or_default(process_group: ProcessGroup | None) -> ProcessGroup:
    """The given group, or the default group."""
    found = dist.group.WORLD if process_group is None else process_group
    if found is None:
        raise ValueError(  # as torch does
            "Default process group has not been initialized: call torch.distributed.init_process_group first"
        )
    return found


@cached_per_group()  # every message asks, and torch takes ten calls to answer
def is_member(process_group: ProcessGroup) -> bool:
    """Whether the calling rank belongs to the group."""
    return dist.get_rank(process_group) >= 0


@cached_per_group()
def own_rank(process_group: ProcessGroup) -> int:
    """The global rank of this process, which belongs to the group."""
    return dist.get_rank()


def require_member(process_group: ProcessGroup) -> None:
    """Raise an error if the calling rank does not belong to the group."""
    if not is_member(process_group):
        raise ProcessGroupError(
            "this rank is not in the process group of the tensor: it may make, save and load the tensor, of which it "
            "holds nothing, and has no part in what the ranks of the group compute"
        )


def group_ranks(process_group: ProcessGroup) -> tuple[int, ...]:
    """The global ranks of a group that the calling rank belongs to, in group order. The same object in every call."""
    require_member(process_group)
    return ranks_of(process_group)


def rank_array(process_group: ProcessGroup) -> IntArray:
    """The same as one array, which is read-only, and made once for each group."""
    require_member(process_group)
    return _rank_array(process_group)


@cached_per_group()
def _rank_array(process_group: ProcessGroup) -> IntArray:
    return read_only(np.array(ranks_of(process_group), dtype=np.int64))


def sends(process_group: ProcessGroup) -> bool:
    """Whether the group can send from one rank to another; one written in Python may have collectives only."""
    kind = type(process_group)
    return kind is ProcessGroup or kind.send is not ProcessGroup.send


def without_data() -> bool:
    """Whether tensors that are made now have a size and no data: within torch's FakeTensorMode."""
    return dispatch_mode(FAKE_MODE) is not None


def talks(process_group: ProcessGroup) -> bool:
    """Whether there is anybody to agree with: a fake group has nobody, an outsider is not asked."""
    if not is_member(process_group) or process_group.size() == 1:
        return False
    return not is_fake(process_group) and not without_data()


def is_fake(process_group: ProcessGroup) -> bool:
    """Whether this is a group of torch's `fake` backend, whose other ranks are not there."""
    require_member(process_group)
    return _backend(process_group) == "fake"


@cached_per_group()
def _backend(process_group: ProcessGroup) -> str:
    return str(dist.get_backend(process_group))


def is_threaded(process_group: ProcessGroup) -> bool:
    """Whether the ranks are threads of one process, as in torch's own tests: they share what belongs to a process."""
    return type(process_group) is not ProcessGroup and dist.get_backend(process_group) == "threaded"


@cached_per_group()
def ranks_of(process_group: ProcessGroup) -> tuple[int, ...]:
    """The global ranks of a group that this rank is in, in group order."""
    return tuple(dist.get_process_group_ranks(process_group))


def listed(ranks: Sequence[int]) -> str:
    """Ranks as an error shows them: all, or the first ones of many."""
    if len(ranks) <= 2 * SHOWN:
        return str(list(ranks))
    return f"[{', '.join(map(str, ranks[:SHOWN]))}, ... {len(ranks)} in all]"
