"""What a rank has done in a group, call by call: a history with one digest, the same on all ranks in step.

Each call that sends something adds an entry, and sends nothing for it. The digest of a history covers all its entries,
so comparing two ends compares two histories. The last entries are kept: an error can name the first that differ.
After an error that all ranks raise, all begin a new epoch with an empty history.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

Fields = Mapping[str, object]  # what must be the same on every rank, by name

DIGEST = 16
KEPT = 64  # entries that can be named
LIBRARIES = ("shardwise.", "torch.")
GENERATED = "<eval_with_key>"  # begins the name of the file of code that torch makes of a graph
_NAMELESS = GENERATED, f"{Path(torch.__file__).parent}/"  # code of no module that is not a user's
NAMES = ("verb", "op")  # the fields that name a call
EPOCHS = 2**18 - 1  # after so many, tags of meetings are used again


class Traffic(threading.local):
    """How often this thread has begun to talk to other ranks."""

    count = 0


traffic = Traffic()


class CallFingerprint:
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


class CallRecord(NamedTuple):
    """A call: its number in the epoch, the digest of the history up to it, what was said of it, and who called."""

    number: int
    digest: bytes
    said: CallFingerprint
    meets: bool  # whether the call exchanges headers with all ranks, which tell what differs
    code: CodeType | None
    line: int

    def described(self) -> dict[str, Any]:
        """As other ranks are told of it."""
        fields = {name: str(value) for name, value in self.said.fields.items()}
        name = next((fields[name] for name in NAMES if name in fields), "a call")
        place = f" ({self.code.co_filename}:{self.line})" if self.code is not None else ""
        return {"digest": self.digest.hex(), "call": name + place, "fields": fields, "meets": self.meets}


class CallHistory:
    """What this rank keeps of a group."""

    def __init__(self, name: str, epoch: int = 0) -> None:
        self.name, self.first_epoch = name, epoch
        self.entries: deque[CallRecord] = deque(maxlen=KEPT)
        self.failure: list[str] | None = None  # kind and message of what it raised alone, and the others do not know
        self.left: Any = None  # a meeting that it did not wait for, knowing that another rank had failed
        self.broken = ""  # why the group cannot be used any more
        self.verdict: Exception | None = None  # that a watchdog has found, and this rank has not raised yet
        self.published: Any = None  # what the others can read of this rank
        self.publishing = threading.Lock()
        self.sent = 0  # calls that sent something, in all epochs
        self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        self.epoch, self.number = epoch, 0
        self.last_sent = -1  # the last call whose data was all sent when it began; of others some is sent later
        self.digest = hashlib.blake2b(epoch.to_bytes(8, "little"), digest_size=DIGEST).digest()
        self.entries.clear()
        self.failure = None
        self.plain_calls: dict[Any, int] = {}  # calls whose plain operands were compared, by function and sizes

    def begin_epoch(self) -> None:
        """All ranks raise the same error, or have: what was sent before is of no account."""
        self._begin(self.epoch + 1)

    def add(self, said: CallFingerprint, *, meets: bool = False) -> CallRecord:
        """This rank begins a call."""
        traffic.count += 1
        self.sent += meets
        self.digest = hashlib.blake2b(self.digest + said.digest, digest_size=DIGEST).digest()
        entry = CallRecord(self.number, self.digest, said, meets, *_caller())
        self.number += 1
        self.entries.append(entry)
        return entry

    def data_tag(self) -> int:
        """Of data that is sent in the last call: ranks with other histories do not read it."""
        self.sent += 1
        return 1 << 30 | self.epoch % 64 << 24 | int.from_bytes(self.digest[:3], "little")

    def meeting_tag(self, number: int, kind: int) -> int:
        """Of a message in a meeting: ranks that meet in different calls do read it."""
        return (self.epoch % EPOCHS + 1) << 12 | number % 1024 << 2 | kind


def _caller() -> tuple[CodeType | None, int]:
    """The line of the user's code that this is called from; in the thread of a backward there may be none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        if not name.startswith(LIBRARIES) and (name or not frame.f_code.co_filename.startswith(_NAMELESS)):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None, 0
