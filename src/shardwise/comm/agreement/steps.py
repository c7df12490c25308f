"""Ranks that agree, or fail together.

A verb runs its local part through `in_step`: what one rank finds wrong is told to all before anyone enters the next
collective, and what must be the same everywhere is compared by digest, with the history of all calls before. So either
every rank goes on or every rank raises the same error. Ops run theirs through `in_op`, which adds to the history and
sends nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from torch.distributed import ProcessGroup

from shardwise import settings
from shardwise.comm.agreement.gathered import Gathered
from shardwise.comm.agreement.headers import REPORTS, SIZES, Compared, Headers
from shardwise.comm.agreement.small_messages import HEADER, Gathering
from shardwise.comm.group import (
    CallFingerprint,
    CallHistory,
    CallRecord,
    Fields,
    group_ranks,
    group_state,
    is_large,
    is_member,
    is_tagged,
    listed,
    or_default,
    talks,
)
from shardwise.comm.peers import (
    abort_group,
    check_peers,
    difference,
    end_epoch,
    failure_of,
    find_verdict,
    mark_known,
    mismatch_error,
    notify_of_failure,
    require_usable,
)
from shardwise.comm.tracing import record
from shardwise.errors import RankMismatchError, ShardwiseError, same_kind

T = TypeVar("T")

SUBJECT = "ShardedTensor"  # what an error says has the fields that differ
MOST_TOLD = 16  # calls before a meeting that ranks tell where their histories differ
SOON = 0.05  # seconds after which a rank looks that has raised already, and lets the others know


def in_step(process_group: ProcessGroup, work: Callable[[], tuple[T, Fields | CallFingerprint]]) -> T:
    """Do this rank's part of a verb; return only if it went well on every rank and all agree on the fields.

    Every rank of the group must call it. About 100 bytes travel, more only when there is an error to tell.
    """
    if not settings.current().validate or not talks(process_group):
        alone = work()[0]
        if settings.current().validate:
            _forecast_meeting(process_group)
        return alone
    settle(process_group)
    value, fields, error = _attempt(process_group, work)
    _meet(process_group, fields, error, b"").end()
    return cast(T, value)


class Step(Generic[T]):
    """The same in two halves: `value` is there at once, while the ranks compare; `finish` before acting on it."""

    def __init__(self, process_group: ProcessGroup, work: Callable[[], tuple[T, Fields | CallFingerprint]]) -> None:
        self._group, self._asked = process_group, settings.current().validate and talks(process_group)
        if self._asked:
            settle(process_group)
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
        elif settings.current().validate:
            _forecast_meeting(self._group)


def in_step_sharing(
    process_group: ProcessGroup, work: Callable[[], tuple[T, Fields | CallFingerprint, Any]], *, subject: str = SUBJECT
) -> tuple[T, Gathered[Any]]:
    """The same, and what each rank brings (plain values that JSON knows) is given to all, in group order.

    The subject is what an error says has these fields.
    """

    def encoded() -> tuple[T, Fields | CallFingerprint, bytes]:
        value, fields, brought = work()
        return value, fields, json.dumps(brought).encode()

    value, told = in_step_telling(process_group, encoded, subject=subject)
    return value, told.changed(json.loads)


def in_step_telling(
    process_group: ProcessGroup,
    work: Callable[[], tuple[T, Fields | CallFingerprint, bytes]],
    *,
    subject: str = SUBJECT,
) -> tuple[T, Gathered[bytes]]:
    """The same for bytes; up to `room` of them travel with the digest."""
    if not talks(process_group):
        value, _, brought = work()
        _forecast_meeting(process_group)
        return value, Gathered.alike(brought, process_group.size() if is_member(process_group) else 1)

    def attempt() -> tuple[tuple[T, bytes], Fields | CallFingerprint]:
        value, fields, brought = work()
        return (value, brought), fields

    settle(process_group)
    result, fields, error = _attempt(process_group, attempt)
    brought = b"" if result is None else result[1]
    told = _meet(process_group, fields, error, brought, subject).end()
    return cast(tuple[T, bytes], result)[0], told


def _forecast_meeting(process_group: ProcessGroup) -> None:
    """Note the meeting that there would be, if somebody wants to know what a call would send."""
    if record.is_forecast() and is_member(process_group) and process_group.size() > 1:
        sent = 0 if is_large(process_group) else HEADER * (process_group.size() - 1)
        every, known = sent * process_group.size(), not is_large(process_group)
        foreseen = record.begin("meeting", sent, sent, in_all=every, known=known)
        if foreseen is not None:
            foreseen.end()


def _attempt(
    process_group: ProcessGroup, work: Callable[[], tuple[T, Fields | CallFingerprint]]
) -> tuple[T | None, Fields | CallFingerprint, Exception | None]:
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


# In ops ---------------------------------------------------------------------------------------------------------------


def record_call(process_group: ProcessGroup, said: CallFingerprint) -> None:
    """Add a call to the history of the group. Nothing is sent; ranks that differ find out when they meet, or wait."""
    if settings.current().validate and talks(process_group):
        settle(process_group).add(said)


def begin_sending(process_group: ProcessGroup, said: CallFingerprint) -> int:
    """Add a transfer to the history, whether or not checks are on. Gives the tag of its data."""
    history = settle(process_group)
    history.add(said)
    return history.data_tag()


def in_op(process_group: ProcessGroup, work: Callable[[], tuple[T, Fields | CallFingerprint]]) -> T:
    """As `in_step`, for an op: by default nothing is sent, and what is wrong here the others hear of when they wait."""
    step = step_of_op(process_group, work)
    step.finish()
    return step.value


def step_of_op(
    process_group: ProcessGroup, work: Callable[[], tuple[T, Fields | CallFingerprint]]
) -> Step[T] | Followed[T]:
    """The same in two halves, as `Step`."""
    strict = settings.current().strict
    return Step(process_group, work) if strict else Followed(process_group, work)


class Followed(Generic[T]):
    """A call of an op that was added to the history."""

    def __init__(self, process_group: ProcessGroup, work: Callable[[], tuple[T, Fields | CallFingerprint]]) -> None:
        asked = settings.current().validate and talks(process_group)
        try:
            self.value, fields = work()
        except Exception as error:
            if asked and not _is_told(error, process_group):
                notify_of_failure(process_group, error)  # of whatever kind: it may be wrong here alone
            raise
        if asked:
            record_call(process_group, fields if isinstance(fields, CallFingerprint) else CallFingerprint(fields))

    def finish(self) -> None:
        """Nothing to wait for."""


def check(process_group: ProcessGroup | None = None) -> None:
    """Compare with all ranks of the group, by default of the default group, what they have done. Every rank calls it.

    Raises a RankMismatchError on every rank if they are not in step: it names the first calls that differ, and their
    places in the users' code. Ranks also compare where they meet anyway, such as in `item`, `full_tensor` and `save`.
    A small message travels::

        >>> shardwise.check()  # all ranks have done the same
    """
    in_step(or_default(process_group), lambda: (None, {"verb": "check"}))


# Meetings -------------------------------------------------------------------------------------------------------------


def settle(process_group: ProcessGroup, *, tell: bool = True) -> CallHistory:
    """Before this rank goes on: end the meetings that it has left, and tell the others what it has raised alone.

    Gives its history.
    """
    history = require_usable(process_group)
    if history.left is not None:
        history.left.end()
    if tell and history.failure is not None and settings.current().validate:
        error = same_kind(*history.failure)
        _Meeting(process_group, history, {}, error, b"", SUBJECT, told=True).end()
    return history


def _meet(
    process_group: ProcessGroup,
    fields: Fields | CallFingerprint,
    error: Exception | None,
    brought: bytes,
    subject: str = SUBJECT,
) -> _Meeting:
    """Begin a meeting, after those that this rank owes to the others for what it has done since it settled."""
    history = settle(process_group, tell=error is None)  # else it is told now
    return _Meeting(process_group, history, fields, error, brought, subject)


class _Meeting:
    """Digests of all ranks on their way."""

    def __init__(
        self,
        group: ProcessGroup,
        history: CallHistory,
        fields: Fields | CallFingerprint,
        error: Exception | None,
        brought: bytes,
        subject: str,
        *,
        told: bool = False,
    ) -> None:
        self._group, self._history, self._error, self._subject = group, history, error, subject
        self._said = fields if isinstance(fields, CallFingerprint) else CallFingerprint(fields)
        self._owed = told  # whether the meeting is for nothing but an error that this rank has raised already
        self._told = told  # whether this rank has raised already what will come of it
        self._number = history.number
        self._before = tuple(history.entries)[-MOST_TOLD:]
        self._entry: CallRecord | None = None
        if error is None:
            self._entry = history.add(self._said, meets=True)
        elif history.failure is None:
            history.failure = [type(error).__name__, str(error)]  # for those who wait elsewhere, and look
        self._patience = SOON if told else None
        kind = Compared if is_large(group) else Headers
        digest = _digest_of_error(history.digest, cast(Exception, error)) if told else history.digest
        self._round = kind(group, digest, error is not None and not told, brought, self._tag)
        self._sizes: Gathering | None = None  # of what each rank reports
        self._entries: Gathering | None = None  # and the reports; both may be under way when the meeting is left

    def _tag(self, kind: int) -> int:
        return self._history.meeting_tag(self._number, kind)

    def end(self) -> Gathered[bytes]:
        """What each rank brings; raises the same error on every rank unless nobody failed and all fields agree.

        Each rank raises it once: not here, if it has done so before.
        """
        try:
            agreed = self._round.agree(self._look, self._patience)
            if agreed:
                self._history.left = None
                if self._owed:  # all ranks have raised the same error: there is nothing to tell
                    end_epoch(self._group)
                return self._round.told(self._look)
            error = mark_known(_verdict(self._reports(), group_ranks(self._group)), group_ranks(self._group))
        except Exception as found:
            if not self._told or not _is_told(found, self._group) or self._is_lost():
                raise
            return Gathered.alike(b"", 1)
        self._history.left = None
        end_epoch(self._group)
        if self._told:
            return Gathered.alike(b"", 1)
        raise error from self._error

    def _is_lost(self) -> bool:
        """Whether the others did not hear what this rank has raised, for one of them is gone: it will never be told."""
        return self._history.failure is not None and not self._history.broken

    def _look(self, peers: Any) -> None:
        """Give the meeting up if it is known that not all will come to it."""
        if is_tagged(self._group):
            check_peers(self._group, peers)
            return
        require_usable(self._group)
        error = None if self._told else find_verdict(self._group, peers)
        if error is None:
            return
        if isinstance(error, RankMismatchError):  # a rank is in another collective
            abort_group(self._group, error)
            require_usable(self._group)
        self._history.left, self._told = self, True  # a rank has failed, and will come to it when it talks next
        raise error

    def _reports(self) -> list[Any]:
        failure = None if self._error is None else [type(self._error).__name__, str(self._error)]
        said = {name: str(value) for name, value in self._said.fields.items()}
        call = "" if self._entry is None else self._entry.described()["call"]
        before = {entry.number: entry.described() for entry in self._before}
        report = json.dumps([said, failure, self._subject, before, call]).encode()
        if self._sizes is None:
            self._sizes = Gathering(self._group, len(report).to_bytes(8, "little"), 8, self._tag(SIZES))
        lengths = [int.from_bytes(size, "little") for size in self._sizes.wait(self._look, self._patience)]
        if self._entries is None:
            self._entries = Gathering(self._group, report, max(lengths), self._tag(REPORTS))
        entries = zip(self._entries.wait(self._look, self._patience), lengths, strict=True)
        return [json.loads(entry[:length]) for entry, length in entries]


def _digest_of_error(history: bytes, error: Exception) -> bytes:
    """Of an error that a rank raised alone, after these calls: the same on all ranks that raised the same error."""
    return CallFingerprint({"raised": type(error).__name__, "message": str(error), "after": history.hex()}).digest


def notify_if_alone(process_group: ProcessGroup | None, error: Exception) -> None:
    """Let the other ranks know of an error that leaves a call on this rank, and that they may not find by themselves.

    What the library finds wrong by what all ranks know, all ranks raise. Any other error may be of this rank alone. If
    all ranks have raised the same error, one round of headers says so before they talk next.
    """
    if process_group is not None and not isinstance(error, ShardwiseError):
        _tell(process_group, error)


def epoch_mark(process_group: ProcessGroup) -> int:
    """A mark of now, for `notify_of_leaving`."""
    return group_state(process_group).history.epoch if talks(process_group) else 0


def notify_of_leaving(process_group: ProcessGroup, error: Exception, mark: int) -> None:
    """This rank leaves what all ranks do together; if the others do not, they raise this error.

    Not if the ranks have all raised an error since the mark: then all leave it, for that.
    """
    if group_state(process_group).is_registered and mark == epoch_mark(process_group):
        _tell(process_group, error)


def _tell(process_group: ProcessGroup, error: Exception) -> None:
    """Notify the other ranks of an error, unless all ranks know it."""
    if not group_state(process_group).is_registered:
        return  # it has been destroyed
    if settings.current().validate and talks(process_group) and not _is_told(error, process_group):
        notify_of_failure(process_group, error)


def _is_told(error: Exception, process_group: ProcessGroup) -> bool:
    """Whether every rank of the group knows the error."""
    return set(group_ranks(process_group)) <= set(getattr(error, "known_to", ()))


def _verdict(reports: list[Any], ranks: tuple[int, ...]) -> Exception:
    """The one error that every rank raises, from what all ranks reported."""
    failed = [(rank, one[1]) for rank, one in zip(ranks, reports, strict=True) if one[1] is not None]
    if failed:
        rank, (kind, message) = failed[0]
        others = "" if len(failed) == 1 else f" and {len(failed) - 1} more"
        return failure_of(rank, kind, message, others)
    first, _, subject, before, call = reports[0]
    for rank, (*_, theirs, _) in zip(ranks, reports, strict=True):
        for number, entry in before.items():
            if number in theirs and theirs[number]["digest"] != entry["digest"]:
                return mismatch_error(difference(int(number), (ranks[0], before), (rank, theirs)))
    for rank, (fields, *_, other) in zip(ranks, reports, strict=True):
        for name in [*first, *fields]:
            mine, theirs = first.get(name, "nothing"), fields.get(name, "nothing")
            if mine != theirs:
                return RankMismatchError(
                    f"{subject} {name} property does not match from different ranks! "
                    f"{name}={mine} on rank:{ranks[0]} does not match with {name}={theirs} on rank:{rank}. "
                    f"Rank {ranks[0]} is in {call}, rank {rank} in {other}."
                )
    return RankMismatchError(f"ranks {listed(ranks)} differ in values that read the same: {first}")
