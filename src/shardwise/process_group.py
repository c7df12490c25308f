"""Process groups: who is in one, where a placement lies in it, and whether its ranks agree.

Ranks fail together. A verb runs its local part through `in_step`: what one rank finds wrong is told to all before
anyone enters the next collective, and what must be the same everywhere is compared by digest. So either every
rank goes on or every rank raises the same error.
"""

from __future__ import annotations

import hashlib
import json
import threading
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
    TransferError,
    same_kind,
)
from shardwise.layout import Layout
from shardwise.placement import Placement, RemoteDevice

T = TypeVar("T")
Fields = Mapping[str, object]  # what must be the same on every rank, by name

# torch 2.13 gave the collective a new name and deprecated the old one, the only one before.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

DIGEST = 16
SUBJECT = "ShardedTensor"  # what an error says has the fields that differ
HEADER = 128  # bytes: digest, whether this rank failed, length of what it brings, and that itself if there is room
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


def group_ranks(process_group: ProcessGroup) -> list[int]:
    """The global ranks of a group that the calling rank belongs to, in group order."""
    return dist.get_process_group_ranks(process_group)


def collective_device(process_group: ProcessGroup) -> torch.device:
    """Where a tensor must lie for this group's backend to move it."""
    for device in process_group._device_types:
        if device.type == "cpu":
            return device
    device = process_group._device_types[0]
    return torch.device(device.type, torch.get_device_module(device.type).current_device())


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
    _compare(process_group, fields, error, b"")
    return cast(T, value)


class Step(Generic[T]):
    """The same in two halves: `value` is there at once, while the ranks compare; `finish` before acting on it."""

    def __init__(
        self, process_group: ProcessGroup, work: Callable[[], tuple[T, Fields]], *, validate: bool | None = None
    ) -> None:
        """``validate`` is what the settings say, unless given: in a backward, what they said in the forward."""
        self._group = process_group
        validate = settings.current().validate if validate is None else validate
        self._asked = validate and talks(process_group)
        value, self._fields, self._error = _attempt(process_group, work)
        self._failed = self._error is not None
        self.value = cast(T, value)
        if self._asked:
            header = _header(self._fields, self._error, b"")
            self._headers = _Gathering(process_group, header, [HEADER] * process_group.size())
        if self._failed:
            self.finish()

    def finish(self) -> None:
        """Raise the same error on every rank unless it went well on every rank and all agree."""
        if self._asked:
            _judge(self._group, self._headers.wait(), self._fields, self._error)
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
    letters = _compare(process_group, fields, error, brought, subject)
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
        if set(group_ranks(process_group)) <= set(getattr(error, "told_to", ())):
            raise
        return None, {}, error
    return value, fields, None


def _header(fields: Fields, error: Exception | None, brought: bytes) -> bytes:
    told = brought if len(brought) <= ROOM else b""
    return (_digest(fields) + bytes([error is not None]) + len(brought).to_bytes(8, "little") + told).ljust(
        HEADER, b"\0"
    )


def _compare(
    process_group: ProcessGroup, fields: Fields, error: Exception | None, brought: bytes, subject: str = SUBJECT
) -> list[tuple[int, bytes]]:
    """Raise the same error on every rank unless nobody failed and all fields agree; else what each brings."""
    headers = _all_gather(process_group, _header(fields, error, brought), [HEADER] * process_group.size())
    return _judge(process_group, headers, fields, error, subject)


def _judge(
    process_group: ProcessGroup, headers: list[bytes], fields: Fields, error: Exception | None, subject: str = SUBJECT
) -> list[tuple[int, bytes]]:
    begin = HEADER - ROOM
    if all(other[: DIGEST + 1] == headers[0][: DIGEST + 1] for other in headers) and not headers[0][DIGEST]:
        lengths = [int.from_bytes(other[DIGEST + 1 : begin], "little") for other in headers]
        return [(length, other[begin : begin + length]) for length, other in zip(lengths, headers, strict=True)]
    failure = None if error is None else [type(error).__name__, str(error)]
    report = json.dumps([{name: str(value) for name, value in fields.items()}, failure]).encode()
    sizes = _all_gather(process_group, len(report).to_bytes(8, "little"), [8] * process_group.size())
    lengths = [int.from_bytes(size, "little") for size in sizes]
    reports = [json.loads(entry) for entry in _all_gather(process_group, report, lengths)]
    verdict = _verdict(reports, group_ranks(process_group), subject)
    verdict.told_to = tuple(group_ranks(process_group))  # type: ignore[attr-defined] # whatever kind of error it is
    raise verdict from error


def _verdict(reports: list[Any], ranks: list[int], subject: str) -> Exception:
    """The one error that every rank raises, from what all ranks reported."""
    failed = [(rank, failure) for rank, (_, failure) in zip(ranks, reports, strict=True) if failure is not None]
    if failed:
        rank, (kind, message) = failed[0]
        others = "" if len(failed) == 1 else f" and {len(failed) - 1} more"
        return same_kind(kind, f"{message}\n(found on rank {rank}{others}; every rank of the group stops)")
    first = reports[0][0]
    for rank, (fields, _) in zip(ranks, reports, strict=True):
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
    return _Gathering(process_group, data, lengths).wait()


class Traffic(threading.local):
    """How often this thread has begun to talk to other ranks."""

    count = 0


traffic = Traffic()


class _Gathering:
    """An all-gather of bytes under way."""

    def __init__(self, process_group: ProcessGroup, data: bytes, lengths: list[int]) -> None:
        traffic.count += 1
        self._lengths, self._longest, self._group = lengths, max(lengths), process_group
        if self._longest == 0:
            return
        device = collective_device(process_group)
        padded = bytearray(data.ljust(self._longest, b"\0"))
        self._mine = torch.frombuffer(padded, dtype=torch.uint8).to(device)
        self._everyone = torch.empty(len(lengths) * self._longest, dtype=torch.uint8, device=device)
        with self._lost_is_said():
            if self._longest <= HEADER:
                self._mine = self._mine.repeat(len(lengths))  # to each at once: sooner there than around the ring
                self._work: Any = dist.all_to_all_single(self._everyone, self._mine, group=process_group, async_op=True)
            else:
                self._work = _all_gather_single(self._everyone, self._mine, group=process_group, async_op=True)

    def wait(self) -> list[bytes]:
        if self._longest == 0:
            return [b""] * len(self._lengths)
        with self._lost_is_said():
            self._work.wait()
        gathered = bytes(self._everyone.cpu().numpy())
        return [gathered[k * self._longest :][:length] for k, length in enumerate(self._lengths)]

    @contextmanager
    def _lost_is_said(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise TransferError(
                f"rank {dist.get_rank()} could not compare with ranks {group_ranks(self._group)} "
                "what they are about to do: one of them has died, left, or taken longer than the group's timeout"
            ) from error
