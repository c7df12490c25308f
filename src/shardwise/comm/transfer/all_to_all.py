"""Sending what a plan says in one exchange of messages, which lie where they lie, or are packed."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm.peers import CallMark
from shardwise.comm.tracing import record
from shardwise.comm.transfer.messages import LocalMemory, Message, Messages
from shardwise.comm.transfer.operands import TransferOperands
from shardwise.comm.transfer.planned import PlannedTransfer
from shardwise.comm.transfer.sums import write_sum
from shardwise.comm.transfer.views import as_bytes, copy, fits, parts_of
from shardwise.comm.transfer.wire import (
    Buffer,
    PendingExchange,
    Ready,
    described,
    exchange,
    failed_before,
    failing_together,
    unrecorded,
)


class Carrier(ABC):
    """A transfer under way in one exchange, or in one collective."""

    _way: PendingExchange | None  # None once everything is in its place
    _failure: str | None = None

    def __init__(self, operands: TransferOperands, planned: PlannedTransfer) -> None:
        self.outs = operands.outs
        self._plan, self._group, self._dtype = operands.plan, operands.group, operands.dtype
        self._rank, self._wire = planned.rank, planned.wire
        kinds = operands.plan.device_types
        self._pinned = self._wire.type == "cpu" and "cuda" in kinds  # through pinned memory of the host
        self._waiting = threading.Lock()

    def wait(self) -> list[torch.Tensor]:
        """Finish, and give the local tensors of the destination. A transfer that has failed raises every time."""
        with self._waiting:
            if self._failure is not None:
                raise failed_before(self._failure)
            if self._way is not None:
                try:
                    self._way.wait()
                    with unrecorded(), failing_together(self._group):
                        self._deliver()
                except BaseException as error:
                    self._failure = described(error)
                    raise
                self._way = None
        return self.outs

    @abstractmethod
    def _deliver(self) -> None:
        """Bring what has arrived to its place, unless it arrived there."""

    def _empty(self, count: int) -> torch.Tensor:
        made = torch.empty(count, dtype=self._dtype, device=self._wire, pin_memory=self._pinned)
        return record.as_buffer(made) if record.running else made

    def _fits(self, tensor: torch.Tensor) -> bool:
        """Whether this memory can be sent, or received into, as it lies."""
        return fits(tensor, self._dtype, self._wire)


class AllToAll(Carrier):
    """A transfer in which every rank of the group takes part, in one exchange of messages."""

    def __init__(self, operands: TransferOperands, planned: PlannedTransfer, ready: Ready, *, owned: bool) -> None:
        """With ``owned``, nobody else has the destination: messages may be received straight into it."""
        super().__init__(operands, planned)
        sums, sent, self._due = operands.plan.sums, planned.sent, planned.due
        self._sources = LocalMemory(operands.tensors, self._fits)
        self._targets = LocalMemory(operands.outs, self._fits)
        self._arrived: list[tuple[Message, torch.Tensor]] = []
        given = self._given(sent)
        self._own = self._sources.views(sent.own) if sums else []  # where they are added to what arrives
        # What lies apart is added up slowly: it is packed among what arrives.
        apart = not all(piece.is_contiguous() for piece in self._own)
        # What the caller owns is not received into: after an error, messages that are late might still come.
        taken = self._taken(straight=owned and not sums, with_own=apart)
        self._way = self._begin(given, taken, ready())
        # Our own pieces are not sent, which would only copy them.
        if apart:
            place = next(buffer for message, buffer in self._arrived if message is self._due.own)
            _pack(place, self._own)
        elif not sums:
            self._copy_own(sent.own)

    def _begin(self, given: list[Buffer], taken: list[Buffer], call: CallMark) -> PendingExchange:
        return exchange(self._group, taken, given, call, self._wire)

    def _given(self, sent: Messages) -> list[Buffer]:
        """What each rank gets: as it lies if it may, else packed; what several ranks get is packed once."""
        given: list[Buffer] = []
        made: dict[int, torch.Tensor] = {}
        for message in sent.others:
            found = made.get(message.same)
            if found is None:
                found = self._sources.run(message)
                if found is None:
                    found = self._empty(message.elements)
                    _pack(found, self._sources.views(message))
                made[message.same] = found
            given.append((message.member, found))
        return given

    def _taken(self, *, straight: bool, with_own: bool) -> list[Buffer]:
        """Where the message of each rank goes: into its place if it lies there whole, else into a buffer.

        The buffers lie one behind another, if asked for with room for this rank's own pieces among them.
        """
        own, taken, apart = self._due.own, list[Buffer](), list[Message]()
        for message in self._due.each:
            if message is own and not with_own:
                continue
            place = self._targets.run(message) if straight else None
            if place is None:
                apart.append(message)
            else:
                taken.append((message.member, place))
        if apart:
            counts = [message.elements for message in apart]
            self._arrived = list(zip(apart, self._empty(sum(counts)).split_with_sizes(counts), strict=True))
            taken += [(message.member, place) for message, place in self._arrived if message is not own]
        return taken

    def _copy_own(self, sent: Message) -> None:
        """Bring what stays on this rank to its place."""
        source, target = self._sources.run(sent), self._targets.run(self._due.own)
        if source is not None and target is not None:
            as_bytes(target).copy_(as_bytes(source))  # of some dtypes, nothing else can be copied
            return
        for into, piece in zip(self._targets.views(self._due.own), self._sources.views(sent), strict=True):
            copy(into, piece)

    def _deliver(self) -> None:
        if self._plan.sums:
            self._add_up()
        else:
            for message, buffer in self._arrived:
                views = self._targets.views(message)
                for piece, arrived in zip(views, parts_of(buffer, views), strict=True):
                    copy(piece, arrived)
        del self._arrived, self._sources, self._targets, self._own

    def _add_up(self) -> None:
        """Write the sums of what has come for each part of the destination, in order of the ranks."""
        due, outs = self._due, self._targets.tensors
        spots = due.spots
        parts: list[Any] = [None] * len(spots)
        parts[due.own.run] = self._own
        for message, buffer in self._arrived:
            counts = [spot.elements for spot in message.spots]
            parts[message.run] = [buffer] if len(counts) == 1 else buffer.split_with_sizes(counts)
        alike = due.pieces.meetings
        if alike is None or due.sums_cover != sum(out.numel() for out in self.outs):
            for out in self.outs:
                out.zero_()
        if alike is None:
            for spot, part in zip(spots, parts, strict=True):
                target = spot.view(outs)
                target.add_(part.view(target.shape).to(target.device))
            return
        for numbers in alike:
            write_sum(spots[numbers[0]].view(outs), [parts[number] for number in numbers])


def _pack(buffer: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Copy pieces into a buffer, one behind another."""
    for part, piece in zip(parts_of(buffer, pieces), pieces, strict=True):
        copy(part, piece)
