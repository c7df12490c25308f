"""A meeting of all ranks of a group: what they are about to do is compared, and what one finds wrong all raise.

Each rank sends the digest of its history. Only where digests differ, or a rank has failed, ranks also send what they
say of the call, and find the same error in that.
"""

from __future__ import annotations

import json
from typing import Any, cast

from torch.distributed import ProcessGroup

from shardwise import settings
from shardwise.comm.agreement.gathered import Gathered
from shardwise.comm.agreement.headers import REPORTS, SIZES, Compared, Headers
from shardwise.comm.agreement.small_messages import Gathering
from shardwise.comm.group import (
    CallFingerprint,
    CallHistory,
    CallRecord,
    Fields,
    group_ranks,
    is_large,
    is_tagged,
    listed,
)
from shardwise.comm.peers import (
    PLAIN_VALUE,
    abort_group,
    check_peers,
    difference,
    difference_of_fields,
    end_epoch,
    failure_of,
    find_verdict,
    mark_known,
    mismatch_error,
    require_usable,
)
from shardwise.errors import RankMismatchError, same_kind

SUBJECT = "ShardedTensor"  # what an error says has the fields that differ
MOST_TOLD = 16  # calls before a meeting that ranks tell where their histories differ
SOON = 0.05  # seconds after which a rank looks that has raised already, and lets the others know


def settle(process_group: ProcessGroup, *, tell: bool = True) -> CallHistory:
    """Before this rank goes on: end the meetings that it has left, and tell the others what it has raised alone.

    Gives its history.
    """
    history = require_usable(process_group)
    if history.left is not None:
        history.left.end()
    if tell and history.failure is not None and settings.current().validate:
        error = same_kind(*history.failure)
        Meeting(process_group, history, {}, error, b"", SUBJECT, told=True).end()
    return history


def meet(
    process_group: ProcessGroup,
    fields: Fields | CallFingerprint,
    error: Exception | None,
    brought: bytes,
    subject: str = SUBJECT,
) -> Meeting:
    """Begin a meeting, after those that this rank owes to the others for what it has done since it settled."""
    history = settle(process_group, tell=error is None)  # else it is told now
    return Meeting(process_group, history, fields, error, brought, subject)


class Meeting:
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
            if not self._told or not is_told(found, self._group) or self._is_lost():
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


def is_told(error: Exception, process_group: ProcessGroup) -> bool:
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
            if mine != theirs and PLAIN_VALUE in name:
                return mismatch_error(f"{call}{difference_of_fields(ranks[0], first, rank, fields)}")
            if mine != theirs:
                return RankMismatchError(
                    f"{subject} {name} property does not match from different ranks! "
                    f"{name}={mine} on rank:{ranks[0]} does not match with {name}={theirs} on rank:{rank}. "
                    f"Rank {ranks[0]} is in {call}, rank {rank} in {other}."
                )
    return RankMismatchError(f"ranks {listed(ranks)} differ in values that read the same: {first}")
