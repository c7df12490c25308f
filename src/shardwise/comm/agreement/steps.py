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
from shardwise.comm.agreement.meeting import SUBJECT, is_told, meet, settle
from shardwise.comm.agreement.small_messages import HEADER
from shardwise.comm.group import CallFingerprint, Fields, group_state, is_large, is_member, or_default, talks
from shardwise.comm.peers import CallMark, mark_of_call, notify_of_failure
from shardwise.comm.tracing import record
from shardwise.errors import ShardwiseError

T = TypeVar("T")


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
    meet(process_group, fields, error, b"").end()
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
            self._meeting = meet(process_group, self._fields, self._error, b"")
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
    told = meet(process_group, fields, error, brought, subject).end()
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
        if is_told(error, process_group):
            raise
        return None, {}, error
    return value, fields, None


# In ops ---------------------------------------------------------------------------------------------------------------


def record_call(process_group: ProcessGroup, said: CallFingerprint) -> None:
    """Add a call to the history of the group. Nothing is sent; ranks that differ find out when they meet, or wait."""
    if settings.current().validate and talks(process_group):
        settle(process_group).add(said)


def begin_sending(process_group: ProcessGroup, said: CallFingerprint, *, at_once: bool = True) -> CallMark:
    """Add a transfer to the history, whether or not checks are on. Gives its mark, with the tag of its data.

    ``at_once`` says whether all of the data is sent now, or some of it when other data has come.
    """
    history = settle(process_group)
    history.add(said)
    return mark_of_call(history, at_once=at_once)


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
        if asked and group_state(process_group).history.failure is not None:
            settle(process_group)  # or the others would not hear of an error of this call
        try:
            self.value, fields = work()
        except Exception as error:
            if asked and not is_told(error, process_group):
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


def settled_epoch(process_group: ProcessGroup | None) -> int:
    """The epoch that the calls of this rank are in from now on, after all errors that it has raised; alike on all."""
    if process_group is None or not talks(process_group):
        return 0
    history = group_state(process_group).history
    if history.left is not None or history.failure is not None:
        history = settle(process_group)
    return history.epoch


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
    if settings.current().validate and talks(process_group) and not is_told(error, process_group):
        notify_of_failure(process_group, error)
