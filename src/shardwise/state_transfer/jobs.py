"""Jobs that were started apart: how they find each other in a store, meet, part, and meet again.

Each job calls, again and again; a call is known by the job's incarnation (it may have been started anew) and a number.
The last rank of a job that comes to a call speaks for it. The target's speaker says that it waits. The source's
answers, with terms: the meeting that both have, or a new one. An answer is written once, so whoever gives up waiting
and whoever answers see the same.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from torch.distributed.distributed_c10d import Store

from shardwise.checkpoint.ranks import Ranks
from shardwise.comm.peers import StoreChannel
from shardwise.errors import TransferError
from shardwise.state_transfer.job_meeting import SIDES, JobMeeting, Terms, failure, require_fine, wait_for
from shardwise.state_transfer.job_store import PAUSE, SLACK, Address, StoreClient

LONGEST_LIMIT = 366 * 24 * 3600.0  # seconds: torch's stores count milliseconds
PROTOCOL = 3  # of what jobs say to each other here and in their meetings: it changes with that


class OtherJob:
    """The other job, as one rank of this one sees it."""

    def __init__(
        self,
        ranks: Ranks,
        gives: tuple[bool, bool],
        *,
        address: str,
        name: str,
        timeout: float,
        backend: str,
        host: bool | None,
    ) -> None:
        """Every rank of this job calls it, and says whether it gives a source, or a target. The first one hosts the
        store where it is said, else the source's does."""
        side = int(not gives[0])
        self._ranks, self._side, self._timeout, self.backend, self._name = ranks, side, timeout, backend, name
        self._server: Store | None = None
        self._calls, self._closed = 0, False
        self._patient = True  # until the other job was missed: then it is looked for, and not waited for
        self._looked: str | None = None  # the call of the source that was seen last
        self._missed: str | None = None  # and one that led to nothing
        self.meeting: JobMeeting | None = None
        hosts = side == 0 if host is None else host

        def begin() -> tuple[Address, dict[str, object], Any]:
            if gives[0] == gives[1]:
                raise ValueError(
                    "between jobs one gives a source and the other a target: give one of them, and not both"
                )
            if backend not in ("gloo", "nccl"):
                raise ValueError(f"the backend between jobs is 'gloo' or 'nccl'; found {backend!r:.80}")
            if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= LONGEST_LIMIT:
                raise ValueError(f"the timeout is a number of seconds above 0, at most a year; found {timeout!r:.80}")
            if not isinstance(name, str) or not name:
                raise ValueError(f"the name of a pair of jobs is a string; found {name!r:.80}")
            where = Address.parse(address)
            if hosts and ranks.first:
                self._server = where.serve(timeout)
            said = {"address": address, "name": name, "timeout": timeout, "backend": backend, "host": host}
            return where, {"side": SIDES[side], **said}, uuid.uuid4().hex[:12] if ranks.first else None

        self._address, told = ranks.in_step(begin)
        self._incarnation: str = told[0]
        self._prefix = f"shardwise/{name}"
        self._client: StoreClient | None = None

    def __str__(self) -> str:
        return f"the {SIDES[1 - self._side]} of '{self._name}' at {self._address}"

    def meet(self, version: int) -> tuple[JobMeeting, bool]:
        """Call, and wait for the other job; gives the meeting, and whether it is a new one. Every rank calls it."""
        if self._closed:
            raise TransferError("this transfer was closed: make another one")
        self._calls += 1
        try:
            terms = self._answered(self._reached(), version)
        except BaseException:  # an interruption, too
            self.part()
            raise
        old = self.meeting
        if old is not None and old.terms.epoch == terms.epoch:
            old.terms = terms
            return old, False
        if old is not None:
            old.close()
        assert self._client is not None
        self.meeting = JobMeeting(
            self._client, self._prefix, self._ranks, self._side, terms, self._timeout, self.backend
        )
        return self.meeting, True

    def part(self) -> None:
        """After a failure: the meeting is over, and the next call is for another one."""
        self._patient, self._missed = False, self._looked
        if self.meeting is not None:
            self.meeting.close()
        self.meeting = None

    def went_well(self) -> None:
        """The other job is there."""
        self._patient = True

    def is_waiting(self) -> bool:
        """Whether the other job waits for this one. Every rank of this job calls it, and gets the same."""

        def look() -> tuple[None, dict[str, object], Any]:
            try:
                found = self._ranks.first and self._look()
            except TransferError:  # nobody can be seen
                found = False
            return None, {}, found

        return bool(self._ranks.in_step(look)[1][0])

    def _look(self) -> bool:
        client = self._client
        if client is None or not client.sound:
            client = self._renewed()
        if client.is_connecting:
            return False
        client.connected()
        channel = self._channel
        if self._side:
            channel.add("target/seen", 1)
            self._looked = channel.read("source/waiting")
            return self._looked not in (None, self._missed)
        last = channel.add("target/calls", 0)
        call = {} if last == channel.add("target/read", 0) else _call(channel, last)
        return bool(call) and bool(channel.missing([call["answer"]]))

    def close(self) -> None:
        """Hang up, for good. Who hosts the store takes it along."""
        self._closed = True
        self.part()
        if self._client is not None:
            self._client.close()
        self._client = self._server = None

    # Calls -----------------------------------------------------------------------------------------------------------

    def _reached(self) -> StoreChannel:
        """The store, connected anew where the process that hosted it is another one now."""
        if self._client is not None and self._client.sound:
            try:
                self._client.connected().check(["any"])
                return self._channel
            except TransferError:
                pass
        self._renewed().connected()
        return self._channel

    def _renewed(self) -> StoreClient:
        """Another connection to the store, without waiting for it. A meeting does not outlive its connection."""
        if self.meeting is not None:
            self.meeting.close()
        self.meeting = None
        self._client = StoreClient(self._address, self._timeout)
        self._channel = StoreChannel(self._client, self._prefix)
        return self._client

    def _answered(self, channel: StoreChannel, version: int) -> Terms:
        """The terms on which both jobs go on."""
        call = f"{SIDES[self._side]}/{self._incarnation}/{self._calls}"
        answer, end = f"{call}/answer", time.monotonic() + self._timeout
        epoch = None if self.meeting is None else self.meeting.terms.epoch
        channel.write(f"{call}/{self._ranks.here}", [epoch, self._patient])
        if channel.add(f"{call}/count", 1) == len(self._ranks.all):
            told = channel.read_all([f"{call}/{rank}" for rank in self._ranks.all])
            same = epoch if all(each[0] == epoch for each in told) else None
            self._forget(channel)
            if self._side:
                seen = channel.add("target/seen", 1)
                number = channel.add("target/calls", 1)
                words = {"answer": answer, "epoch": same, "ranks": self._ranks.all, "protocol": PROTOCOL, "seen": seen}
                channel.write(f"target/call/{number}", words)
                found = wait_for(channel, answer, end - time.monotonic()) or self._given_up(channel, answer, str(self))
            else:
                patient = all(each[1] for each in told)
                found = self._found(channel, answer, same, version, patient, end)
        else:
            limit = self._timeout + SLACK  # longer than the one that speaks for them, whose error says more
            found = wait_for(channel, answer, limit) or self._given_up(channel, answer, "the other ranks of this job")
        require_fine(found)
        return Terms.read(found)

    def _found(
        self, channel: StoreChannel, answer: str, epoch: str | None, version: int, patient: bool, end: float
    ) -> dict[str, Any]:
        """Look for the target until it waits, and answer it."""
        seen = channel.add("target/seen", 0)
        looked = f"source/{self._incarnation}/looked"
        before = channel.add(looked, 0)
        channel.add(looked, seen - before)
        if not patient and seen == before:
            missed = TransferError(f"{self} is still gone: no job has come there since it was lost")
            return self._decided(channel, failure(missed, self._who), answer)
        channel.write("source/waiting", answer)
        try:
            while (left := end - time.monotonic()) > 0:
                words = self._next_call(channel, left)
                if words is None:
                    break
                if not words:  # of whoever writes here something else
                    continue
                if words["protocol"] != PROTOCOL:
                    other = TransferError("the two jobs have versions of shardwise that do not talk to each other")
                    self._decided(channel, failure(other, self._who), words["answer"])
                    return self._decided(channel, failure(other, self._who), answer)
                terms = self._terms(words, epoch, version)
                if self._decided(channel, terms.words(), words["answer"]) != terms.words():
                    continue  # it has given up
                if words["seen"] > seen:  # it has come since; if it is lost, it must not count as one that came then
                    channel.add(looked, words["seen"] - seen)
                found = self._decided(channel, terms.words(), answer)
                if found != terms.words():  # a rank of this job has given up: those of the target need not wait
                    step = self.meeting.step if self.meeting is not None and terms.epoch == epoch else 0
                    channel.decide(found, f"{terms.epoch}/{step}/verdict")
                return found
            return self._given_up(channel, answer, str(self))
        finally:
            if self._client is not None and self._client.sound:
                channel.delete(["source/waiting"])

    def _next_call(self, channel: StoreChannel, limit: float) -> dict[str, Any] | None:
        """The target's last call, once there is one that was not read yet; only the source's speaker reads them.

        None where none comes in time; without words where it is not one.
        """
        read, last = channel.add("target/read", 0), channel.add("target/calls", 0)
        number = max(last, read + 1)
        if channel.wait([f"target/call/{number}"], limit, longest=PAUSE):
            return None
        words = _call(channel, number)
        channel.add("target/read", number - read)
        channel.delete([f"target/call/{old}" for old in range(read + 1, number + 1)])
        return words

    def _terms(self, words: dict[str, Any], epoch: str | None, version: int) -> Terms:
        if epoch is None or epoch != words["epoch"]:
            epoch = f"{self._incarnation}-{self._calls}-{uuid.uuid4().hex[:6]}"
        return Terms(epoch, (list(self._ranks.all), words["ranks"]), version)

    def _given_up(self, channel: StoreChannel, answer: str, whom: str) -> dict[str, Any]:
        why = "it has died, or not called run()" + (", or has met another target of this name" if self._side else "")
        late = TransferError(f"waited {self._timeout:g} s for {whom}, which has not come: {why}")
        return self._decided(channel, failure(late, self._who), answer)

    def _decided(self, channel: StoreChannel, proposed: dict[str, Any], answer: str) -> dict[str, Any]:
        found: dict[str, Any] = channel.decide(proposed, answer)
        return found

    @property
    def _who(self) -> str:
        return f"rank {self._ranks.here} of the {SIDES[self._side]}"

    def _forget(self, channel: StoreChannel) -> None:
        """Remove what was said in the call before the last one."""
        old = self._calls - 2
        if old > 0:
            said = ("count", "answer", *self._ranks.all)
            channel.delete([f"{SIDES[self._side]}/{self._incarnation}/{old}/{what}" for what in said])


def _call(channel: StoreChannel, number: int) -> dict[str, Any]:
    """What the target has said in a call; nothing where there is none, or these are not a target's words."""
    try:
        found = channel.read(f"target/call/{number}")
    except ValueError:
        return {}
    known = isinstance(found, dict) and {"answer", "epoch", "ranks", "protocol", "seen"} <= found.keys()
    return found if known else {}
