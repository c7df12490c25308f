"""Process groups: who is in one, where a placement lies in it, and whether its ranks agree.

Ranks fail together. A verb runs its local part through `in_step`: what one rank finds wrong is told to all before
anyone enters the next collective, and what must be the same everywhere is compared by digest. So either every
rank goes on or every rank raises the same error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d, rpc

from shardwise import settings
from shardwise.errors import (
    PlacementError,
    ProcessGroupError,
    RankMismatchError,
    RpcError,
    ShardwiseError,
    same_kind,
)
from shardwise.layout import Layout
from shardwise.meeting import (
    HEADER,
    Gathering,
    Ledger,
    leave_word,
    ledger_of,
    require_unbroken,
    take_word_back,
    word_of,
)
from shardwise.placement import Placement, RemoteDevice

T = TypeVar("T")
Fields = Mapping[str, object]  # what must be the same on every rank, by name

DIGEST = 16
SUBJECT = "ShardedTensor"  # what an error says has the fields that differ
# A header: digest, whether this rank failed, length of what it brings, and that itself if there is room.
ROOM = HEADER - DIGEST - 1 - 8


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
    return process_group if process_group is not None else distributed_c10d._get_default_group()


def is_member(process_group: ProcessGroup) -> bool:
    """Whether the calling rank belongs to the group."""
    return dist.get_rank(process_group) >= 0


def _require_member(process_group: ProcessGroup) -> None:
    if not is_member(process_group):
        raise ProcessGroupError(
            "this rank is not in the process group of the tensor: it may make, save and load the tensor, of which it "
            "holds nothing, and has no part in what the ranks of the group compute"
        )


def group_ranks(process_group: ProcessGroup) -> list[int]:
    """The global ranks of a group that the calling rank belongs to, in group order."""
    _require_member(process_group)
    return dist.get_process_group_ranks(process_group)


def sends(process_group: ProcessGroup) -> bool:
    """Whether the group can send from one rank to another; one written in Python may have collectives only."""
    kind = type(process_group)
    return kind is ProcessGroup or kind.send is not ProcessGroup.send


def without_data() -> bool:
    """Whether tensors that are made now have a size and no data: within torch's FakeTensorMode."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


# Placements in a group ------------------------------------------------------------------------------------------


def locate(placement: Placement, process_group: ProcessGroup) -> Placement:
    """The placement with its rank known, or an error when that rank or worker is not in this group."""
    if placement.worker is not None:
        placement = replace(placement, rank=_worker_rank(placement.worker))
    if placement.rank is not None and is_member(process_group):
        ranks = group_ranks(process_group)
        if placement.rank not in ranks:
            raise PlacementError(f"Global rank {placement.rank} does not exist in input process group: {ranks}")
    return placement


def locate_all(layout: Layout, process_group: ProcessGroup) -> Layout:
    """The layout with every rank known and in the group; a bare device is an error, for nobody would hold it."""
    for place in layout.places:
        if place.rank is None and place.worker is None:
            raise PlacementError(
                f"placement '{place}' names no rank, so no process would hold its shard: write 'rank:N/{place}'"
            )
    if all(place.worker is None for place in layout.places):
        for place in layout.places:
            locate(place, process_group)
        return layout
    return layout.moved(lambda place: locate(place, process_group))


def parse_and_validate_remote_device(
    pg: ProcessGroup, remote_device: RemoteDevice | None
) -> tuple[int | None, torch.device]:
    """The global rank, when it has one, and the device of a placement in this group."""
    place = locate(Placement.of(remote_device), pg)
    return place.rank, place.device


def rpc_workers() -> list[Any] | None:
    """Every worker of the RPC framework; None while it is not initialised."""
    framework: Any = rpc  # what we need of it has no declared types
    if not rpc.is_available() or not framework._is_current_rpc_agent_set():
        return None
    return list(framework._get_current_rpc_agent().get_worker_infos())


def _worker_rank(name: str) -> int:
    workers = rpc_workers()
    if workers is None:
        hint = f"; did you mean rank:{name.removeprefix('rank')}?" if name.startswith("rank") else ""
        raise RpcError(f"RPC framework needs to be initialized for using worker names: {name}{hint}")
    for worker in workers:
        if worker.name == name:
            return int(worker.id)
    raise PlacementError(f"Invalid worker name: {name}")


# Agreement ------------------------------------------------------------------------------------------------------


def in_step(process_group: ProcessGroup, work: Callable[[], tuple[T, Fields]]) -> T:
    """Do this rank's part of a verb; return only if it went well on every rank and all agree on the fields.

    Every rank of the group must call it. 128 bytes per rank travel, more only when there is an error to tell.
    """
    if not settings.current().validate or not talks(process_group):
        return work()[0]
    value, fields, error = _attempt(process_group, work)
    _meet(process_group, fields, error, b"").end()
    return cast(T, value)


class Step(Generic[T]):
    """The same in two halves: `value` is there at once, while the ranks compare; `finish` before acting on it."""

    def __init__(self, process_group: ProcessGroup, work: Callable[[], tuple[T, Fields]]) -> None:
        self._asked = settings.current().validate and talks(process_group)
        value, self._fields, self._error = _attempt(process_group, work)
        self._failed = self._error is not None
        self.value = cast(T, value)
        if self._asked:
            self._meeting = _meet(process_group, self._fields, self._error, b"")
        if self._failed:
            self.finish()

    def finish(self) -> None:
        """Raise the same error on every rank unless it went well on every rank and all agree."""
        if self._asked:
            self._meeting.end()
        elif self._error is not None:
            raise self._error


def in_step_sharing(
    process_group: ProcessGroup, work: Callable[[], tuple[T, Fields, Any]], *, subject: str = SUBJECT
) -> tuple[T, list[Any]]:
    """The same, and what each rank brings (plain values that JSON knows) is given to all, in group order.

    The subject is what an error says has these fields.
    """

    def encoded() -> tuple[T, Fields, bytes]:
        value, fields, brought = work()
        return value, fields, json.dumps(brought).encode()

    value, gathered = in_step_telling(process_group, encoded, subject=subject)
    return value, [json.loads(entry) for entry in gathered]


def in_step_telling(
    process_group: ProcessGroup, work: Callable[[], tuple[T, Fields, bytes]], *, subject: str = SUBJECT
) -> tuple[T, list[bytes]]:
    """The same for bytes; up to `ROOM` of them travel with the digest."""
    if not talks(process_group):
        value, _, brought = work()
        return value, [brought] * (process_group.size() if is_member(process_group) else 1)  # as if all said the same

    def attempt() -> tuple[tuple[T, bytes], Fields]:
        value, fields, brought = work()
        return (value, brought), fields

    result, fields, error = _attempt(process_group, attempt)
    brought = b"" if result is None else result[1]
    letters = _meet(process_group, fields, error, brought, subject).end()
    lengths = [length for length, _ in letters]
    told = [letter for _, letter in letters] if max(lengths) <= ROOM else _all_gather(process_group, brought, lengths)
    return cast(tuple[T, bytes], result)[0], told


def talks(process_group: ProcessGroup) -> bool:
    """Whether there is anybody to agree with: a fake group has nobody, an outsider is not asked."""
    if not is_member(process_group) or process_group.size() == 1:
        return False
    return not is_fake(process_group) and not without_data()


def is_fake(process_group: ProcessGroup) -> bool:
    """Whether this is a group of torch's `fake` backend, whose other ranks are not there."""
    _require_member(process_group)
    return dist.get_backend(process_group) == "fake"


def _attempt(
    process_group: ProcessGroup, work: Callable[[], tuple[T, Fields]]
) -> tuple[T | None, Fields, Exception | None]:
    """What the work gives, or how it failed; an error that every rank of the group knows already is raised at once.

    Work may do verbs of its own, in which the ranks agree. What such a verb has told to all of them, all of them raise.
    """
    try:
        value, fields = work()
    except Exception as error:  # told to every rank, then raised on every rank
        if _is_told(error, process_group):
            raise
        return None, {}, error
    return value, fields, None


def _header(fields: Fields, error: Exception | None, brought: bytes) -> bytes:
    told = brought if len(brought) <= ROOM else b""
    return (_digest(fields) + bytes([error is not None]) + len(brought).to_bytes(8, "little") + told).ljust(
        HEADER, b"\0"
    )


def _meet(
    process_group: ProcessGroup, fields: Fields, error: Exception | None, brought: bytes, subject: str = SUBJECT
) -> _Meeting:
    """Begin a meeting, after those that this rank owes to the others."""
    ledger = ledger_of(process_group)
    require_unbroken(process_group)
    if ledger.left is not None:
        ledger.left.end()
    if ledger.failure is not None and error is None:
        _Meeting(process_group, ledger, {}, same_kind(*ledger.failure), b"", subject, told=True).end()
    return _Meeting(process_group, ledger, fields, error, brought, subject)


class _Meeting:
    """Headers of all ranks on their way."""

    def __init__(
        self,
        group: ProcessGroup,
        ledger: Ledger,
        fields: Fields,
        error: Exception | None,
        brought: bytes,
        subject: str,
        *,
        told: bool = False,
    ) -> None:
        self._group, self._ledger, self._fields, self._error, self._subject = group, ledger, fields, error, subject
        self._told = told  # whether this rank has raised already what will come of it
        self._number, self._failure = ledger.begun, ledger.failure
        ledger.begun += 1
        ledger.failure = None  # told here
        self._headers = Gathering(group, _header(fields, error, brought), [HEADER] * group.size())
        self._sizes: Gathering | None = None  # of what each rank reports
        self._entries: Gathering | None = None  # and the reports; both may be under way when the meeting is left

    def end(self) -> list[tuple[int, bytes]]:
        """What each rank brings; raises the same error on every rank unless nobody failed and all fields agree.

        Each rank raises it once: not here, if it has done so before.
        """
        headers = self._headers.wait(None if self._told else self._look)
        if self._ledger.left is self:
            self._ledger.left = None
        begin = HEADER - ROOM
        if all(other[: DIGEST + 1] == headers[0][: DIGEST + 1] for other in headers) and not headers[0][DIGEST]:
            lengths = [int.from_bytes(other[DIGEST + 1 : begin], "little") for other in headers]
            return [(length, other[begin : begin + length]) for length, other in zip(lengths, headers, strict=True)]
        reports = self._reports()
        if self._failure is not None:
            take_word_back(self._group, self._number)
        if self._told:
            return []
        raise _told_to_all(_verdict(reports, group_ranks(self._group)), self._group) from self._error

    def _look(self) -> None:
        """Leave the meeting for later if a rank has failed before it: that rank may not come for long."""
        require_unbroken(self._group, look=True)
        word = word_of(self._group, self._number)
        if word is not None:
            self._ledger.left, self._told = self, True
            raise _told_to_all(_failure_of(*word), self._group)

    def _reports(self) -> list[Any]:
        failure = None if self._error is None else [type(self._error).__name__, str(self._error)]
        said = {name: str(value) for name, value in self._fields.items()}
        report = json.dumps([said, failure, self._subject]).encode()
        look = None if self._told else self._look
        if self._sizes is None:
            self._sizes = Gathering(self._group, len(report).to_bytes(8, "little"), [8] * self._group.size())
        lengths = [int.from_bytes(size, "little") for size in self._sizes.wait(look)]
        if self._entries is None:
            self._entries = Gathering(self._group, report, lengths)
        return [json.loads(entry) for entry in self._entries.wait(look)]


def raises_alone(process_group: ProcessGroup | None, error: Exception, *, in_op: bool = False) -> None:
    """Let the other ranks know of an error that leaves a call on this rank, and that they may not find by themselves.

    What the library finds wrong by what all ranks know, they all raise; and what is wrong with an op's form.
    """
    if process_group is None or isinstance(error, ShardwiseError):
        return
    if in_op and isinstance(error, (TypeError, AttributeError)):
        return
    if process_group not in distributed_c10d._world.pg_map:
        return  # it has been destroyed
    if settings.current().validate and talks(process_group) and not _is_told(error, process_group):
        leave_word(process_group, error)


def _is_told(error: Exception, process_group: ProcessGroup) -> bool:
    """Whether every rank of the group knows the error."""
    return set(group_ranks(process_group)) <= set(getattr(error, "told_to", ()))


def _told_to_all(error: Exception, process_group: ProcessGroup) -> Exception:
    error.told_to = tuple(group_ranks(process_group))  # type: ignore[attr-defined] # whatever kind of error it is
    return error


def _failure_of(rank: int, kind: str, message: str, others: str = "") -> Exception:
    return same_kind(kind, f"{message}\n(found on rank {rank}{others}; every rank of the group stops)")


def _verdict(reports: list[Any], ranks: list[int]) -> Exception:
    """The one error that every rank raises, from what all ranks reported."""
    failed = [(rank, failure) for rank, (_, failure, _) in zip(ranks, reports, strict=True) if failure is not None]
    if failed:
        rank, (kind, message) = failed[0]
        others = "" if len(failed) == 1 else f" and {len(failed) - 1} more"
        return _failure_of(rank, kind, message, others)
    first, _, subject = reports[0]
    for rank, (fields, *_) in zip(ranks, reports, strict=True):
        for name in [*first, *fields]:
            mine, theirs = first.get(name, "nothing"), fields.get(name, "nothing")
            if mine != theirs:
                return RankMismatchError(
                    f"{subject} {name} property does not match from different ranks! "
                    f"{name}={mine} on rank:{ranks[0]} does not match with {name}={theirs} on rank:{rank}."
                )
    return RankMismatchError(f"ranks {ranks} differ in values that read the same: {first}")


def _digest(fields: Fields) -> bytes:
    hasher = hashlib.blake2b(digest_size=DIGEST)
    for name, value in fields.items():
        hasher.update(f"{name}={value};".encode())
    return hasher.digest()


def _all_gather(process_group: ProcessGroup, data: bytes, lengths: list[int]) -> list[bytes]:
    """What every rank gives, in group order, when the lengths are known."""
    return Gathering(process_group, data, lengths).wait()
