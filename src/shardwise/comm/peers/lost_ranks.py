"""Which ranks of a group are lost, as far as this rank knows without a message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.comm.group import cpu_backend, group_state, listed, ranks_of
from shardwise.errors import TransferError

TRANSFER = "a transfer"  # the call of data that an op sends
PROBE = 2  # the tag of a message that nobody sends: those of meetings and of data are larger


def loss(what: str, error: Exception, process_group: ProcessGroup) -> tuple[TransferError, bool]:
    """The error of a rank that could not do this with the others of a group; and whether it is known who is gone."""
    timed_out = is_late(error)
    gone = [] if timed_out else ranks_gone(process_group, ranks_of(process_group))
    why = "a rank has taken longer than the group's timeout" if timed_out else "a rank has died or left"
    why = who_is_gone(gone) if gone else why
    says = str(error).strip().partition("\n")[0]
    text = f"in {current_call(process_group)}: rank {dist.get_rank()} could not {what}: {why}"
    return TransferError(text + (f". torch says: {says}" if says else "")), bool(gone)


def current_call(process_group: ProcessGroup) -> str:
    """The last call of this rank in a group, and its place in the user's code; of an op, not of its transfer."""
    entries = group_state(process_group).history.entries
    calls = [entry.described()["call"] for entry in list(entries)[-2:]]
    if not calls:
        return "its first call"
    *before, last = calls
    name, _, place = last.partition(" (")
    is_transfer = name == TRANSFER and before and before[0].partition(" (")[2] == place
    return str(before[0] if is_transfer else last)


def is_late(error: Exception) -> bool:
    """Whether others have taken too long, which may come yet."""
    return isinstance(error, TimeoutError) or "timed out" in str(error).lower()


def who_is_gone(gone: Sequence[int]) -> str:
    """As an error says it."""
    return f"rank {gone[0]} is gone" if len(gone) == 1 else f"ranks {listed(gone)[1:-1]} are gone"


def ranks_gone(process_group: ProcessGroup, ranks: Sequence[int]) -> list[int]:
    """Those of these global ranks to which the connection is known to be broken. Only gloo tells; nothing is sent."""
    if cpu_backend(process_group) != "gloo":
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
