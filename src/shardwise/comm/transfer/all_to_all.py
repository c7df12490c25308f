"""Sending what a plan says in one exchange of messages, which lie where they lie, or are packed."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from shardwise.comm.group import own_rank, rank_array
from shardwise.comm.tracing import record
from shardwise.comm.transfer.messages import LocalMemory, Message, Messages, messages_received, messages_sent
from shardwise.comm.transfer.operands import TransferOperands
from shardwise.comm.transfer.sums import write_sum
from shardwise.comm.transfer.views import copy, fits, parts_of
from shardwise.comm.transfer.wire import (
    PendingExchange,
    Ready,
    described,
    exchange,
    failed_before,
    failing_together,
    wire_device,
)


class Carrier(ABC):
    """A transfer under way in one exchange, or in one collective."""

    _way: PendingExchange | None  # None once everything is in its place
    _failure: str | None = None

    def __init__(self, operands: TransferOperands) -> None:
        self.outs = operands.outs
        self._plan, self._group, self._dtype = operands.plan, operands.group, operands.dtype
        self._rank = own_rank(operands.group)
        kinds = operands.plan.device_types
        self._wire = wire_device(kinds, operands.group)
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
                    with torch.no_grad(), failing_together(self._group):
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

    def __init__(self, operands: TransferOperands, ready: Ready, *, owned: bool) -> None:
        """With ``owned``, nobody else has the destination: messages may be received straight into it."""
        super().__init__(operands)
        plan, members = operands.plan, rank_array(operands.group)
        sent, self._due = messages_sent(plan, self._rank, members), messages_received(plan, self._rank, members)
        self._sources, self._targets = (LocalMemory(memory, self._fits) for memory in (operands.tensors, operands.outs))
        self._arrived: list[tuple[Message, torch.Tensor]] = []
        self._own: list[torch.Tensor] = []  # our pieces, where they are added to what arrives
        nothing = torch.empty(0, dtype=torch.uint8, device=self._wire)
        given = self._given(sent, nothing)
        if plan.sums:
            self._own = self._sources.views(sent.own)
        # What lies apart is added up slowly: it is packed among what arrives.
        apart = not all(piece.is_contiguous() for piece in self._own)
        # What the caller owns is not received into: after an error, messages that are late might still come.
        taken = self._taken(nothing, straight=owned and not plan.sums, with_own=apart)
        tag = ready()
        self._way = self._begin(given, taken, tag)
        # Our own pieces are not sent, which would only copy them.
        if apart:
            place = next(buffer for message, buffer in self._arrived if message is self._due.own)
            _pack(place, self._own)
        elif not plan.sums:
            self._copy_own(sent.own)

    def _begin(self, given: list[torch.Tensor], taken: list[torch.Tensor], tag: int) -> PendingExchange:
        return exchange(self._group, taken, given, tag)

    def _given(self, sent: Messages, nothing: torch.Tensor) -> list[torch.Tensor]:
        """The bytes for each rank: as they lie if they may, else packed; what several ranks get is packed once."""
        given = [nothing] * sent.size
        made: dict[int, torch.Tensor] = {}
        for message in sent.each:
            if message is sent.own:
                continue
            found = made.get(message.same)
            if found is None:
                found = self._sources.run(message)
                if found is None:
                    buffer = self._empty(message.elements)
                    _pack(buffer, self._sources.views(message))
                    found = buffer.view(torch.uint8)
                made[message.same] = found
            given[message.member] = found
        return given

    def _taken(self, nothing: torch.Tensor, *, straight: bool, with_own: bool) -> list[torch.Tensor]:
        """Where the bytes of each rank go: into their place if they lie there whole, else into a buffer.

        The buffers lie one behind another, if asked for with room for this rank's own pieces among them.
        """
        taken, own = [nothing] * self._due.size, self._due.own
        apart = []
        for message in self._due.each:
            if message is own and not with_own:
                continue
            place = self._targets.run(message) if straight else None
            if place is None:
                apart.append(message)
            else:
                taken[message.member] = place
        if apart:
            counts = [message.elements for message in apart]
            buffer, size = self._empty(sum(counts)), self._dtype.itemsize
            self._arrived = list(zip(apart, buffer.split_with_sizes(counts), strict=True))
            each = buffer.view(torch.uint8).split_with_sizes([count * size for count in counts])
            for message, place in zip(apart, each, strict=True):
                if message is not own:
                    taken[message.member] = place
        return taken

    def _copy_own(self, sent: Message) -> None:
        """Bring what stays on this rank to its place."""
        source, target = self._sources.run(sent), self._targets.run(self._due.own)
        if source is not None and target is not None:
            target.copy_(source)
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
        due = self._due
        targets = [spot.view(self._targets.tensors) for message in due.each for spot in message.spots]
        parts = list(targets)  # each replaced by what has come for it
        parts[due.own.run] = self._own
        for message, buffer in self._arrived:
            parts[message.run] = parts_of(buffer, targets[message.run])
        alike = due.pieces.meetings
        if alike is None or due.sums_cover != sum(out.numel() for out in self.outs):
            for out in self.outs:
                out.zero_()
        if alike is None:
            for target, part in zip(targets, parts, strict=True):
                target.add_(part.to(target.device))
            return
        for numbers in alike:
            write_sum(targets[numbers[0]], [parts[number] for number in numbers])


def _pack(buffer: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Copy pieces into a buffer, one behind another."""
    for part, piece in zip(parts_of(buffer, pieces), pieces, strict=True):
        copy(part, piece)
