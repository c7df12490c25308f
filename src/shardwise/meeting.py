"""Small messages between all ranks of a group, and word of ranks that failed by themselves or are gone.

A meeting is an exchange of headers of one size: ranks that do different things meet all the same, and find out. A rank
that raises between two meetings does not begin one, for the others may never come, or come with a collective of their
own. It leaves word in the group's store. Who waits in a meeting for long looks there.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from shardwise.errors import TransferError
from shardwise.tracing import record

# torch 2.13 gave the collective a new name and deprecated the old one, the only one before.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

HEADER = 128  # bytes of a header; what is no longer goes to each rank at once, sooner there than around the ring
MOST_EACH = 32  # ranks of a group in which all write to each; with gloo, an all-reduce is as fast there
PATIENCE = 0.5  # seconds after which a rank that waits looks for word of the others; twice as long each time, at most
AT_MOST = 5.0
READ = ", as others have read"
NEWLINE = "\n"
SHOWN = 8  # ranks that an error names, of many
PROBE = 0x5A4D  # the tag of a message that nobody sends


class Traffic(threading.local):
    """How often this thread has begun to talk to other ranks."""

    count = 0


traffic = Traffic()


def collective_device(process_group: ProcessGroup) -> torch.device:
    """Where a tensor must lie for this group's backend to move it."""
    for device in process_group._device_types:
        if device.type == "cpu":
            return device
    if not process_group._device_types:  # a group written in Python, such as torch's threaded one, moves all by itself
        return torch.device("cpu")
    device = process_group._device_types[0]
    return torch.device(device.type, torch.get_device_module(device.type).current_device())


class _Exchange:
    """A collective of small messages under way: every rank of the group gives a tensor, and all get one."""

    def __init__(self, process_group: ProcessGroup, device: torch.device, size: int, begin: Callable[[], Any]) -> None:
        traffic.count += 1
        self._traced = record.begin("meeting", size, size) if record.running else None
        self._group, self._device = process_group, device
        try:
            self._work = begin()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _finish(self, look: Callable[[], object] | None, patience: float = PATIENCE) -> None:
        """Wait until all ranks have come. Whenever that takes long, it is looked whether to go on waiting."""
        if self._traced is not None:
            self._traced.waits()
        while look is not None and not self._is_over(patience):
            look()
            patience = min(2 * patience, AT_MOST)
        try:
            self._work.wait()
        except RuntimeError as error:
            if look is not None:
                look()  # a rank that is gone may have said why
            raise self._lost(error) from error
        if self._traced is not None:
            self._traced.end()

    def _is_over(self, patience: float) -> bool:
        """Whether all ranks have come within so many seconds, or it is known that one will not."""
        begun = time.monotonic()
        if self._device.type == "cpu":
            with suppress(RuntimeError):  # it takes longer; or it has failed, which whoever waits for it will find
                self._work.wait(timedelta(seconds=patience))
                return True
        while not self._work.is_completed():  # of NCCL, whose own waiting with a time limit ends the group
            waited = time.monotonic() - begun
            if waited >= patience:
                return False
            time.sleep(0 if waited < 0.001 else 0.0001)
        return True

    def _lost(self, error: Exception) -> TransferError:
        return lost(f"compare with ranks {listed(ranks_of(self._group))} what they are about to do", error, self._group)


class Gathering(_Exchange):
    """An all-gather of bytes: what a rank pays grows with the group."""

    def __init__(self, process_group: ProcessGroup, data: bytes, longest: int) -> None:
        self._longest, self._size = longest, process_group.size()
        if longest == 0:
            return
        device = collective_device(process_group)
        mine = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8).to(device)
        self._everyone = torch.empty(self._size * longest, dtype=torch.uint8, device=device)
        each = longest <= HEADER and not is_large(process_group)
        self._mine = mine.repeat(self._size) if each else mine  # kept as long as it is sent
        send = dist.all_to_all_single if each else _all_gather_single
        super().__init__(
            process_group,
            device,
            longest * (self._size - 1),
            lambda: send(self._everyone, self._mine, group=process_group, async_op=True),
        )

    def wait(self, look: Callable[[], object] | None = None) -> list[bytes]:
        """What every rank gives, in group order, filled up with zeros."""
        longest = self._longest
        if longest == 0:
            return [b""] * self._size
        self._finish(look)
        gathered = bytes(self._everyone.cpu().numpy())
        return [gathered[begin : begin + longest] for begin in range(0, self._size * longest, longest)]


class Reduction(_Exchange):
    """The largest of each of a few numbers: what a rank pays does not grow with the group."""

    def __init__(self, process_group: ProcessGroup, numbers: Sequence[int]) -> None:
        device = collective_device(process_group)
        self._numbers = torch.tensor(numbers, dtype=torch.int64).to(device)
        super().__init__(
            process_group,
            device,
            2 * self._numbers.nbytes * (process_group.size() - 1) // process_group.size(),
            lambda: dist.all_reduce(self._numbers, dist.ReduceOp.MAX, group=process_group, async_op=True),
        )

    def wait(self, look: Callable[[], object] | None = None) -> list[int]:
        """The largest that any rank has given, for each number."""
        self._finish(look)
        return self._numbers.tolist()


def is_large(process_group: ProcessGroup) -> bool:
    """Whether the group has so many ranks that they do not write to each other one by one. All ranks say the same."""
    return process_group.size() > MOST_EACH


# Ranks that are gone ------------------------------------------------------------------------------------------------


def lost(what: str, error: Exception, process_group: ProcessGroup) -> TransferError:
    """The error of a rank that could not do this with the others of a group: who is gone, and what torch says."""
    timed_out = "timed out" in str(error).lower()  # after which gloo breaks all connections, whoever is there
    gone = [] if timed_out else ranks_gone(process_group)
    who = f"rank {gone[0]} is" if len(gone) == 1 else f"ranks {listed(gone)[1:-1]} are"
    why = "a rank has taken longer than the group's timeout" if timed_out else "a rank has died or left"
    why = f"{who} gone" if gone else why
    says = str(error).strip().partition("\n")[0]
    return TransferError(f"rank {dist.get_rank()} could not {what}: {why} (torch says: {says})")


def ranks_gone(process_group: ProcessGroup) -> list[int]:
    """The global ranks to which the connection is known to be broken. Only gloo tells; nothing is sent."""
    with suppress(RuntimeError, ValueError):  # a group without a backend for the CPU, or without one at all
        if process_group._get_backend(torch.device("cpu")).name() != "gloo":
            return []
        return [rank for rank in ranks_of(process_group) if rank != dist.get_rank() and _is_gone(rank, process_group)]
    return []


def _is_gone(rank: int, process_group: ProcessGroup) -> bool:
    try:
        dist.irecv(torch.empty(1, dtype=torch.uint8), rank, group=process_group, tag=PROBE)
    except RuntimeError:  # at once, where the connection is broken
        return True
    return False


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


# Ranks that failed by themselves --------------------------------------------------------------------------------------


class Ledger:
    """What this rank keeps of a group: how many meetings it has begun, and what it owes to the others."""

    def __init__(self, name: str, life: int) -> None:
        self.name = f"{name}, {life}"  # a group that is made again, by the same name, has another life
        self.begun = 0
        self.failure: list[str] | None = None  # kind and message of what it raised first since the last meeting
        self.left: Any = None  # a meeting that it did not wait for, knowing that another rank had failed
        self.broken = ""  # why the group cannot be used any more


_ledgers: WeakKeyDictionary[ProcessGroup, Ledger] = WeakKeyDictionary()
_lives: Counter[str] = Counter()


def ledger_of(process_group: ProcessGroup) -> Ledger:
    """This rank's ledger of a group."""
    ledger = _ledgers.get(process_group)
    if ledger is None:
        name = process_group.group_name
        _lives[name] += 1
        ledger = _ledgers[process_group] = Ledger(name, _lives[name])
    return ledger


def leave_word(process_group: ProcessGroup, error: Exception) -> None:
    """Let the others know that this rank raises an error before its next meeting. Does not wait for anybody."""
    ledger, store = ledger_of(process_group), _store(process_group)
    if ledger.failure is None:
        ledger.failure = [type(error).__name__, str(error)]
        with suppress(RuntimeError):
            if store is not None:
                store.set(_key(ledger, ledger.begun), json.dumps([dist.get_rank(), *ledger.failure]))


def take_word_back(process_group: ProcessGroup, meeting: int) -> None:
    """The others have been told in a meeting."""
    ledger, store = ledger_of(process_group), _store(process_group)
    with suppress(RuntimeError):  # of a store that is gone, or cannot forget
        if store is not None:
            store.delete_key(_key(ledger, meeting))
            store.delete_key(_key(ledger, meeting, READ))


def forget_failure(process_group: ProcessGroup) -> None:
    """Owe the others nothing for what this rank has raised by itself, unless they have read of it."""
    ledger, store = ledger_of(process_group), _store(process_group)
    with suppress(RuntimeError):
        if ledger.failure is not None and store is not None and not store.check([_key(ledger, ledger.begun, READ)]):
            ledger.failure = None
            take_word_back(process_group, ledger.begun)


def word_of(process_group: ProcessGroup, meeting: int) -> tuple[int, str, str] | None:
    """Of another rank that failed before this meeting: the rank, the kind of its error, and the message."""
    ledger, store = ledger_of(process_group), _store(process_group)
    with suppress(RuntimeError):  # a store that is gone knows nothing
        if store is not None and store.check([_key(ledger, meeting)]):
            rank, kind, message = json.loads(store.get(_key(ledger, meeting)))
            if rank != dist.get_rank():
                store.set(_key(ledger, meeting, READ), "")
                return rank, kind, message
    return None


# Ranks that failed after they had agreed -----------------------------------------------------------------------------


def break_off(process_group: ProcessGroup, error: Exception) -> None:
    """This rank cannot send what it has agreed to send, and the others wait for it: the group is of no use any more."""
    ledger, store = ledger_of(process_group), _store(process_group)
    what = f"{type(error).__name__} ({str(error).strip().partition(NEWLINE)[0]})"
    ledger.broken = (
        f"rank {dist.get_rank()} raised {what} after the ranks had agreed to send: they are out of step, and this "
        "process group cannot be used any more"
    )
    with suppress(RuntimeError):
        if store is not None:
            store.set(_broken_key(ledger), ledger.broken)


def require_unbroken(process_group: ProcessGroup, *, look: bool = False) -> None:
    """Raise if this rank has broken the group off; or, if it looks, another one."""
    ledger, store = ledger_of(process_group), _store(process_group)
    if look and not ledger.broken:
        with suppress(RuntimeError):
            if store is not None and store.check([_broken_key(ledger)]):
                ledger.broken = store.get(_broken_key(ledger)).decode()
    if ledger.broken:
        raise TransferError(ledger.broken)


def wait_for_data(work: Any, process_group: ProcessGroup) -> None:
    """Wait for a collective of the CPU, and look from time to time whether another rank has broken it off."""
    patience = PATIENCE
    while not work.is_completed():
        with suppress(RuntimeError):  # it takes longer; or it has failed, as the last line finds
            work.wait(timedelta(seconds=patience))
            return
        if not work.is_completed():
            require_unbroken(process_group, look=True)
            patience = min(2 * patience, AT_MOST)
    work.wait()


def _broken_key(ledger: Ledger) -> str:
    return f"shardwise/group {ledger.name}: broken off"


def _store(process_group: ProcessGroup) -> Any:
    return distributed_c10d._world.pg_map.get(process_group, (None, None))[1]


def _key(ledger: Ledger, meeting: int, suffix: str = "") -> str:
    return f"shardwise/group {ledger.name}: failed before meeting {meeting}{suffix}"
