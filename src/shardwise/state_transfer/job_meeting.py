"""The ranks of two jobs in one meeting: they agree by a store, and each step ends alike for all of them."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from shardwise.checkpoint.ranks import Ranks
from shardwise.comm.peers import StoreChannel
from shardwise.errors import RankMismatchError, TransferError, same_kind
from shardwise.layout.pictures.words import ranks_text
from shardwise.state_transfer.job_store import PAUSE, SLACK, StoreClient
from shardwise.state_transfer.job_wire import TAG, JobWire, gloo_over, hang_up, nccl_over
from shardwise.state_transfer.meetings import Work

T = TypeVar("T")
SIDES = ("source", "target")
CHUNK = 4 * 2**20  # characters of a value: a store takes 8 MiB
FINE = {"fine": True}


@dataclass(frozen=True)
class Terms:
    """What both jobs know when they meet."""

    epoch: str
    ranks: tuple[Sequence[int], Sequence[int]]  # of each job, in its own numbers
    version: int

    def words(self) -> dict[str, Any]:
        """For the store."""
        return {"epoch": self.epoch, "ranks": [list(each) for each in self.ranks], "version": self.version}

    @staticmethod
    def read(words: Mapping[str, Any]) -> Terms:
        """From the store."""
        return Terms(words["epoch"], (words["ranks"][0], words["ranks"][1]), words["version"])


def failure(error: Exception, who: str) -> dict[str, Any]:
    """A verdict that all raise."""
    return {"kind": type(error).__name__, "message": f"{error}\n(found on {who})"}


def wait_for(
    channel: StoreChannel, key: str, seconds: float, look: Callable[[], object] = lambda: None
) -> dict[str, Any] | None:
    """A decision, as soon as there is one; None where there is none in time. Every second, look around."""
    if channel.wait([key], seconds, lambda missing: look(), longest=PAUSE):
        return None
    try:
        found = channel.read(key)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise TransferError("what is in the store was not written by a job of shardwise: give an address of its own")
    return found


def require_fine(verdict: Mapping[str, Any]) -> None:
    """Raise a verdict that says so."""
    if "kind" in verdict:
        raise same_kind(verdict["kind"], verdict["message"])


class JobMeeting:
    """The ranks of two jobs, those of the source first. They keep it until one of them fails or is started anew."""

    def __init__(
        self, client: StoreClient, prefix: str, ranks: Ranks, side: int, terms: Terms, timeout: float, backend: str
    ) -> None:
        self._client, self._timeout, self._backend = client, timeout, backend
        self._prefix = f"{prefix}/{terms.epoch}"
        self._channel = StoreChannel(client, self._prefix)
        self.terms, self._side, self.ranks = terms, side, ranks
        shifts = (0, max(terms.ranks[0]) + 1)
        self.shift = shifts[side]
        self.here = self.shift + ranks.here
        self._names = {
            shift + rank: f"rank {rank} of the {name}"
            for name, shift, some in zip(SIDES, shifts, terms.ranks, strict=True)
            for rank in some
        }
        self.everyone: Sequence[int] = list(self._names)
        numbers, verb = (
            ranks_text(shifts[1] + rank for rank in terms.ranks[1]),
            "are" if len(terms.ranks[1]) > 1 else "is",
        )
        self.who = f"the source's ranks come first: {numbers} {verb} {ranks_text(terms.ranks[1])} of the target."
        self.size = max(self.everyone) + 1
        self.step = 0
        self._said: list[list[str]] = []  # keys of this rank, of the last steps
        self._wire: JobWire | None = None
        self._beside: Any = None  # gloo among the ranks of the target

    def in_step(self, work: Work[T]) -> tuple[T, Sequence[bytes]]:
        """By the store: the last that comes reads what all have said, and decides for all."""
        try:
            value, fields, told = work()
        except Exception as error:  # told to every rank, then raised on every rank
            self._raise(error)
        self._say(fields, told)
        require_fine(self._verdict())
        everything = self._told()
        self.step += 1
        return value, everything

    def agree(self) -> None:
        """Return only if all ranks have come here: what was sent has arrived.

        In the target one rank reads the decision, and hands it to the others past the store: so they all take what has
        arrived, or none does.
        """
        handed = self._side and not self._is_first
        try:
            self._say({}, b"")
            found = {} if handed else self._verdict()
        except TransferError as error:  # the store is out of reach: what was said may have arrived there all the same
            found = failure(error, self._names[self.here])
        if handed:
            self._be_handed_down()
        else:
            if self._side:
                self._hand_down(fine="kind" not in found)
            require_fine(found)
            self._read()
        self.step += 1

    @property
    def _is_first(self) -> bool:
        """Of its job."""
        return self.ranks.here == self.terms.ranks[self._side][0]

    def _hand_down(self, *, fine: bool) -> None:
        word = torch.tensor([fine], dtype=torch.uint8)
        for number in range(1, len(self.terms.ranks[1])):
            with suppress(RuntimeError):  # a rank that is gone takes nothing
                self._beside.send([word], number, TAG).wait(timedelta(seconds=self._timeout))

    def _be_handed_down(self) -> None:
        word = torch.zeros(1, dtype=torch.uint8)
        try:
            self._beside.recv([word], 0, TAG).wait(timedelta(seconds=2 * self._timeout + SLACK))
        except RuntimeError as error:
            first = self._names[self.shift + self.terms.ranks[1][0]]
            self._raise(TransferError(f"{first}, which reads what was decided, has died or left: {error}"))
        if not word.item():
            self._raise(TransferError("not all ranks have sent and received everything"))

    def _read(self) -> None:
        """Nobody leaves, and takes the store with it, before all that read the decision have read it."""
        with suppress(TransferError):
            if self._channel.add(self._key("readers"), 1) == len(self.terms.ranks[0]) + 1:
                self._channel.write(self._key("read"), FINE)
            elif self._is_first:
                self._channel.wait([self._key("read")], self._timeout, longest=PAUSE)

    # In the store ----------------------------------------------------------------------------------------------------

    def _key(self, what: object, step: int | None = None) -> str:
        return f"{self.step if step is None else step}/{what}"

    def _say(self, fields: Mapping[str, Any], told: bytes) -> None:
        """Leave this rank's word; the last one decides."""
        channel, packed = self._channel, base64.b64encode(zlib.compress(told, 1)).decode()
        chunks = [packed[at : at + CHUNK] for at in range(0, len(packed), CHUNK)]
        for number, chunk in enumerate(chunks[1:], 1):
            channel.write(self._key(f"{self.here}.{number}"), chunk)
        named = {name: str(value) for name, value in fields.items()}
        channel.write(self._key(self.here), {"chunks": len(chunks), "fields": named, "told": chunks[0]})
        if channel.add(self._key("count"), 1) == len(self.everyone):
            channel.decide(self._compared(), self._key("verdict"))
        self._said.append([str(self.here), *(f"{self.here}.{number}" for number in range(1, len(chunks)))])
        if len(self._said) > 2:  # all ranks have left the step before the last one, and read what was said in it
            old = self._said.pop(0) + (["count", "verdict", "readers", "read"] if self.here == self.everyone[0] else [])
            channel.delete([self._key(what, self.step - 2) for what in old])

    def _compared(self) -> dict[str, Any]:
        """The verdict of what all have said."""
        said = [words["fields"] for words in self._words()]
        for rank, fields in zip(self.everyone, said, strict=True):
            differ = [name for name in {**said[0], **fields} if said[0].get(name) != fields.get(name)]
            if differ:
                name, first = differ[0], self._names[self.everyone[0]]
                here = f"{name}={said[0].get(name, 'nothing')} on {first}"
                there = f"{name}={fields.get(name, 'nothing')} on {self._names[rank]}"
                return failure(RankMismatchError(f"the transfer's {name} differs: {here}, {there}"), first)
        return FINE

    def _words(self) -> list[dict[str, Any]]:
        return self._channel.read_all([self._key(rank) for rank in self.everyone])

    def _verdict(self) -> dict[str, Any]:
        """What was decided; where nobody decides in time, this rank does."""
        key = self._key("verdict")

        def look() -> None:
            gone = [] if self._wire is None else self._wire.gone()
            if gone:
                who = "; ".join(self._names[rank] for rank in gone[:8])
                lost = TransferError(f"died or left before all ranks had everything: {who}")
                self._channel.decide(failure(lost, self._names[self.here]), key)

        found = wait_for(self._channel, key, self._timeout, look)
        if found is None:
            missing = set(self._channel.missing([self._key(rank) for rank in self.everyone]))
            absent = [rank for rank in self.everyone if self._key(rank) in missing]
            who = "; ".join(self._names[rank] for rank in absent[:8]) or "the last one to decide"
            late = TransferError(f"not all ranks came within {self._timeout:g} s: missing is {who}")
            found = self._channel.decide(failure(late, self._names[self.here]), key)
        return found

    def _told(self) -> list[bytes]:
        """What each rank has told."""
        told = []
        for rank, words in zip(self.everyone, self._words(), strict=True):
            later = (self._channel.read(self._key(f"{rank}.{number}")) for number in range(1, words["chunks"]))
            told.append(zlib.decompress(base64.b64decode("".join((words["told"], *later)))))
        return told

    def _raise(self, error: Exception) -> NoReturn:
        """Raise what has failed here, or before elsewhere; the others do, too."""
        raise self.failed(error) from error

    def failed(self, error: Exception) -> Exception:
        """Tell the others that this rank could not go on. Gives what all raise: the first that was told."""
        try:
            verdict = self._channel.decide(failure(error, self._names[self.here]), self._key("verdict"))
        except TransferError:  # nobody can be told
            return error
        return same_kind(verdict["kind"], verdict["message"]) if "kind" in verdict else error

    # Bytes -----------------------------------------------------------------------------------------------------------

    def wire(self, kinds: frozenset[str]) -> JobWire:
        """A backend of its own, made over the store once all have planned."""
        numbers = {rank: number for number, rank in enumerate(self.everyone)}
        accelerated = self._backend == "nccl" and kinds != {"cpu"}
        device = torch.device("cuda", torch.cuda.current_device()) if accelerated else torch.device("cpu")

        def made(store: Store) -> tuple[Any, Any]:
            data, among = (PrefixStore(f"{self._prefix}/{what}", store) for what in ("data", "among"))
            here, targets = self._client.address.reached_from(), self.terms.ranks[1]
            place = data, numbers[self.here], len(numbers), self._timeout
            backend = nccl_over(*place, device) if accelerated else gloo_over(*place, here)
            if not self._side or len(targets) == 1:
                return backend, None
            return backend, gloo_over(among, targets.index(self.ranks.here), len(targets), self._timeout, here)

        backend, self._beside = self._client.connect_over(made, self._timeout)
        self._wire = JobWire(backend, numbers, self._names, self._timeout, device)
        return self._wire

    def close(self) -> None:
        """Break the connections."""
        if self._wire is not None:
            self._wire.close()
        if self._beside is not None:
            hang_up(self._beside)
        self._wire = self._beside = None
