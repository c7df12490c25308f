"""What is known of a process group without a message: its ranks, how it sends, and which of its ranks are gone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from shardwise.errors import TransferError

MOST_EACH = 32  # ranks of a group in which all write to each
SHOWN = 8  # ranks that an error names, of many
PROBE = 2  # the tag of a message that nobody sends: those of meetings and of data are larger
CPU = torch.device("cpu")


def collective_device(process_group: ProcessGroup) -> torch.device:
    """Where a tensor must lie for this group's backend to move it."""
    for device in process_group._device_types:
        if device.type == "cpu":
            return device
    if not process_group._device_types:  # a group written in Python, such as torch's threaded one, moves all by itself
        return CPU
    device = process_group._device_types[0]
    return torch.device(device.type, torch.get_device_module(device.type).current_device())


def is_large(process_group: ProcessGroup) -> bool:
    """Whether the group has so many ranks that they do not write to each other one by one. All ranks say the same."""
    return process_group.size() > MOST_EACH


_gloo: WeakKeyDictionary[ProcessGroup, Any] = WeakKeyDictionary()


def is_tagged(process_group: ProcessGroup) -> bool:
    """Whether memory of the CPU is sent by gloo, whose messages between two ranks are told apart by a tag."""
    return gloo_of(process_group) is not None


def gloo_of(process_group: ProcessGroup) -> Any:
    """The backend that sends memory of the CPU, if it is gloo; else None. Asked once for each group."""
    if process_group not in _gloo:
        is_gloo = type(process_group) is ProcessGroup and _cpu_backend(process_group) == "gloo"
        _gloo[process_group] = process_group._get_backend(CPU) if is_gloo else None
    return _gloo[process_group]


def _cpu_backend(process_group: ProcessGroup) -> str:
    with suppress(RuntimeError, ValueError):  # a group without a backend for the CPU, or without one at all
        return str(process_group._get_backend(CPU).name())
    return ""


def timeout_of(process_group: ProcessGroup) -> timedelta:
    """How long a rank of this group may wait for the others."""
    with suppress(RuntimeError, ValueError, AttributeError):  # a torch whose backends do not say it
        found: Any = process_group._get_backend(CPU)
        return timedelta(seconds=found.options._timeout.total_seconds())
    return distributed_c10d.default_pg_timeout


def store_of(process_group: ProcessGroup) -> Any:
    """The store in which ranks of a group leave word for each other; None where it has none."""
    return distributed_c10d._world.pg_map.get(process_group, (None, None))[1]


# Who is in a group --------------------------------------------------------------------------------------------------


_members: WeakKeyDictionary[ProcessGroup, tuple[int, ...]] = WeakKeyDictionary()


def ranks_of(process_group: ProcessGroup) -> tuple[int, ...]:
    """The global ranks of a group that this rank is in, in group order; listed once, for a group keeps its ranks."""
    ranks = _members.get(process_group)
    if ranks is None:
        ranks = _members[process_group] = tuple(dist.get_process_group_ranks(process_group))
    return ranks


def listed(ranks: Sequence[int]) -> str:
    """Ranks as an error shows them: all, or the first ones of many."""
    if len(ranks) <= 2 * SHOWN:
        return str(list(ranks))
    return f"[{', '.join(map(str, ranks[:SHOWN]))}, ... {len(ranks)} in all]"


# Ranks that are gone ------------------------------------------------------------------------------------------------


def loss(what: str, error: Exception, process_group: ProcessGroup) -> tuple[TransferError, bool]:
    """The error of a rank that could not do this with the others of a group; and whether it is known who is gone."""
    timed_out = is_late(error)
    gone = [] if timed_out else ranks_gone(process_group, ranks_of(process_group))
    why = "a rank has taken longer than the group's timeout" if timed_out else "a rank has died or left"
    why = who_is_gone(gone) if gone else why
    says = str(error).strip().partition("\n")[0]
    text = f"rank {dist.get_rank()} could not {what}: {why}" + (f" (torch says: {says})" if says else "")
    return TransferError(text), bool(gone)


def is_late(error: Exception) -> bool:
    """Whether others have taken too long, which may come yet."""
    return isinstance(error, TimeoutError) or "timed out" in str(error).lower()


def who_is_gone(gone: Sequence[int]) -> str:
    """As an error says it."""
    return f"rank {gone[0]} is gone" if len(gone) == 1 else f"ranks {listed(gone)[1:-1]} are gone"


def ranks_gone(process_group: ProcessGroup, ranks: Sequence[int]) -> list[int]:
    """Those of these global ranks to which the connection is known to be broken. Only gloo tells; nothing is sent."""
    if _cpu_backend(process_group) != "gloo":
        return []
    return [rank for rank in ranks if rank != dist.get_rank() and _is_gone(rank, process_group)]


def _is_gone(rank: int, process_group: ProcessGroup) -> bool:
    try:
        dist.irecv(torch.empty(1, dtype=torch.uint8), rank, group=process_group, tag=PROBE)
    except RuntimeError:  # at once, where the connection is broken
        return True
    except ValueError:  # the group has been destroyed on this rank
        return False
    return False
