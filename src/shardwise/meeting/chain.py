"""What a rank has done in a group, call by call: a chain of digests, which is the same on all ranks that are in step.

Each call that sends something adds an entry, and sends nothing for it. The digest of a chain covers all its entries, so
comparing two ends compares two histories; the last entries are kept, so that an error can name the first that differ.
After an error that all ranks raise, all begin a new epoch with an empty chain.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup

from shardwise.meeting.group import store_of

Fields = Mapping[str, object]  # what must be the same on every rank, by name

DIGEST = 16
KEPT = 64  # entries that can be named
LIBRARIES = ("shardwise.", "torch.")
NAMES = ("verb", "op")  # the fields that name a call
EPOCHS = 2**18 - 1  # after so many, tags of meetings are used again


class Traffic(threading.local):
    """How often this thread has begun to talk to other ranks."""

    count = 0


traffic = Traffic()


class Said:
    """What a rank says of a call: fields, which are only read if there is an error to make, and their digest."""

    __slots__ = ("_fields", "digest")

    def __init__(self, fields: Fields | Callable[[], Fields], digest: bytes | None = None) -> None:
        self._fields = fields
        self.digest = digest_of(self.fields) if digest is None else digest

    @property
    def fields(self) -> Fields:
        """By name."""
        return self._fields() if callable(self._fields) else self._fields


def digest_of(fields: Fields) -> bytes:
    """Of names and values, as they read."""
    hasher = hashlib.blake2b(digest_size=DIGEST)
    for name, value in fields.items():
        hasher.update(f"{name}={value};".encode())
    return hasher.digest()


class Entry(NamedTuple):
    """A call: its number in the epoch, the digest of the chain up to it, what was said of it, and who called."""

    number: int
    digest: bytes
    said: Said
    code: CodeType | None
    line: int

    def described(self) -> dict[str, Any]:
        """As other ranks are told of it."""
        fields = {name: str(value) for name, value in self.said.fields.items()}
        name = next((fields[name] for name in NAMES if name in fields), "a call")
        place = f" ({self.code.co_filename}:{self.line})" if self.code is not None else ""
        return {"digest": self.digest.hex(), "call": name + place, "fields": fields}


class Ledger:
    """What this rank keeps of a group."""

    def __init__(self, name: str, epoch: int = 0) -> None:
        self.name, self.first_epoch = name, epoch
        self.entries: deque[Entry] = deque(maxlen=KEPT)
        self.failure: list[str] | None = None  # kind and message of what it raised alone, and the others do not know
        self.left: Any = None  # a meeting that it did not wait for, knowing that another rank had failed
        self.broken = ""  # why the group cannot be used any more
        self.verdict: Exception | None = None  # that a watchdog has found, and this rank has not raised yet
        self.published: Any = None  # what the others can read of this rank
        self.publishing = threading.Lock()
        self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        self.epoch, self.number = epoch, 0
        self.digest = hashlib.blake2b(epoch.to_bytes(8, "little"), digest_size=DIGEST).digest()
        self.entries.clear()
        self.failure = None

    def begin_epoch(self) -> None:
        """All ranks raise the same error, or have: what was sent before is of no account."""
        self._begin(self.epoch + 1)

    def add(self, said: Said) -> Entry:
        """This rank begins a call."""
        traffic.count += 1
        self.digest = hashlib.blake2b(self.digest + said.digest, digest_size=DIGEST).digest()
        entry = Entry(self.number, self.digest, said, *_caller())
        self.number += 1
        self.entries.append(entry)
        return entry

    def data_tag(self) -> int:
        """Of data that is sent in the last call: ranks with other chains do not read it."""
        return 1 << 30 | self.epoch % 64 << 24 | int.from_bytes(self.digest[:3], "little")

    def meeting_tag(self, number: int, kind: int) -> int:
        """Of a message in a meeting: ranks that meet in different calls do read it."""
        return (self.epoch % EPOCHS + 1) << 12 | number % 1024 << 2 | kind


def _caller() -> tuple[CodeType | None, int]:
    """The line of the user's code that this is called from; in the thread of a backward there may be none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        if not name.startswith(LIBRARIES):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None, 0


_ledgers: WeakKeyDictionary[ProcessGroup, Ledger] = WeakKeyDictionary()


def ledger_of(process_group: ProcessGroup) -> Ledger:
    """This rank's ledger of a group."""
    ledger = _ledgers.get(process_group)
    if ledger is None:
        ledger = _ledgers[process_group] = Ledger(f"{process_group.group_name}, {_life(process_group)}")
    return ledger


def _life(process_group: ProcessGroup) -> int:
    """A group that is made again in a store, by the same name, has another life there.

    The store counts them, for each rank: a process that joins later has not had those that others had elsewhere.
    """
    store = store_of(process_group)
    with suppress(RuntimeError):  # a store that is gone: no word is left in it
        if store is not None:
            return int(store.add(f"shardwise/{process_group.group_name}: lives of {process_group.rank()}", 1))
    return 0


# Groups that outlive what is done in them: those of a pool of ranks, which does one task after another --------------


def begin_anew(process_group: ProcessGroup, number: int) -> None:
    """Forget what was done in a group, and what its ranks owe each other. All ranks call it, with the same number.

    They begin with an epoch that none of them has had, so all must have called `put_away` before.
    """
    store, name = store_of(process_group), f"{process_group.group_name}, anew {number}"
    first = store.add(_epochs(process_group), 0) + number
    _ledgers[process_group] = Ledger(name, int(store.compare_set(f"shardwise/{name}", "", str(first))))


def put_away(process_group: ProcessGroup) -> None:
    """Write down how many epochs this rank has had in a group since it began anew."""
    ledger = ledger_of(process_group)
    if ledger.epoch != ledger.first_epoch:
        store_of(process_group).add(_epochs(process_group), ledger.epoch - ledger.first_epoch)


def _epochs(process_group: ProcessGroup) -> str:
    return f"shardwise/{process_group.group_name}: epochs"
