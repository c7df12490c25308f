"""Carrying: bundles packed, sent and unpacked, two at a time with each rank, so that these overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from shardwise.state_transfer.bundles import Bundle, Part, aligned
from shardwise.state_transfer.wires import Message, Waiting, Wire
from shardwise.transfer.views import as_bytes, copy, copy_all, is_as_it_lies

View = Callable[[Part], torch.Tensor]  # where a part lies on this rank
SLOTS = 2  # bundles with each rank that are under way at a time


@dataclass(frozen=True, eq=False)
class Load:
    """All that one rank sends, receives and keeps."""

    sends: Mapping[int, Sequence[Bundle]]  # by rank
    receives: Mapping[int, Sequence[Bundle]]
    kept: Sequence[tuple[Part, Part]]  # what goes from this rank to itself: from where, and where to
    dtypes: Sequence[torch.dtype]  # in which each route travels

    def arriving(self) -> Iterator[Part]:
        """All parts that this rank gets."""
        for bundles in self.receives.values():
            for bundle in bundles:
                yield from bundle.alone
                yield from bundle.packed
        yield from (part for _, part in self.kept)

    @cached_property
    def rounds(self) -> int:
        """In how many rounds all of it goes."""
        return max(map(len, (*self.sends.values(), *self.receives.values())), default=0)

    def bundles(self, side: Mapping[int, Sequence[Bundle]], number: int) -> list[tuple[int, Bundle]]:
        """Those of one round, with the ranks."""
        return [(rank, each[number]) for rank, each in side.items() if number < len(each)]


@dataclass(frozen=True, eq=False)
class _Packet:
    """A message with a rank: its bytes, and the parts in it, each with its place there if it is packed."""

    rank: int
    buffer: torch.Tensor
    parts: Sequence[tuple[torch.Tensor | None, torch.Tensor | None, Part]]  # place in the buffer, where it lies


class Carrying:
    """A load that is carried over a wire, as often as one likes, through the same buffers."""

    def __init__(
        self, load: Load, wire: Wire, source: View, target: View, *, pinned: bool, lasts: Callable[[Part], bool]
    ) -> None:
        """``lasts`` says whether the memory of a part of the target is the same in every run: then its place is found
        once, and if it lies in one run, it is received there, and not through a buffer."""
        self._load, self._wire = load, wire
        self._source, self._target, self._lasts = source, target, lasts
        self._pinned = pinned
        self._slots: list[torch.Tensor] = []
        self._rounds: list[tuple[list[_Packet], list[_Packet]] | None] = [None] * load.rounds
        self._kept: list[tuple[torch.Tensor, torch.Tensor | None, Part]] | None = None

    @cached_property
    def buffered(self) -> int:
        """The bytes of its buffers, at most."""
        return SLOTS * self._room

    @cached_property
    def _room(self) -> int:
        load = self._load
        sides = (load.sends, load.receives)
        return max(
            (
                sum(each.nbytes for side in sides for _, each in load.bundles(side, number))
                for number in range(load.rounds)
            ),
            default=0,
        )

    def prepare(self) -> None:
        """Make the buffers."""
        while len(self._slots) < min(SLOTS, self._load.rounds):
            self._slots.append(
                torch.empty(self._room, dtype=torch.uint8, device=self._wire.device, pin_memory=self._pinned)
            )

    def run(self, arrived: Callable[[Part], object]) -> None:
        """Until all is in its place; on an accelerator, until all is in its stream. Each part is told of then."""
        under_way: list[tuple[Waiting, list[_Packet]]] = []
        for number in range(self._load.rounds):
            under_way.append(self._begin(number))
            if not number:
                self._keep(arrived)
            if len(under_way) == SLOTS:
                self._finish(*under_way.pop(0), arrived)
        if not self._load.rounds:
            self._keep(arrived)
        for each in under_way:
            self._finish(*each, arrived)

    def _begin(self, number: int) -> tuple[Waiting, list[_Packet]]:
        receives, sends = self._packets(number)
        every = (part for packet in sends for part in packet.parts)
        copy_all([(place, lying) for place, lying, _ in every if place is not None and lying is not None])
        given = [(packet.rank, packet.buffer) for packet in sends]
        taken: list[Message] = [(packet.rank, packet.buffer) for packet in receives]
        return self._wire.exchange(taken, given), receives

    def _finish(self, waiting: Waiting, packets: list[_Packet], arrived: Callable[[Part], object]) -> None:
        waiting.wait()
        every = [part for packet in packets for part in packet.parts]
        copy_all([(lying, place) for place, lying, _ in every if place is not None and lying is not None])
        for place, lying, part in every:
            if place is not None and lying is None:
                copy(self._target(part), place)
            arrived(part)

    def _keep(self, arrived: Callable[[Part], object]) -> None:
        """Copy what stays on this rank, while the first messages travel."""
        if self._kept is None:
            self._kept = [(self._source(one), self._found(other), other) for one, other in self._load.kept]
        for source, target, part in self._kept:
            copy(self._target(part) if target is None else target, source)
            arrived(part)

    def _found(self, part: Part) -> torch.Tensor | None:
        """Where a part of the target lies, if that lasts."""
        return self._target(part) if self._lasts(part) else None

    def _packets(self, number: int) -> tuple[list[_Packet], list[_Packet]]:
        """The messages of a round; where everything lies is found once."""
        found = self._rounds[number]
        if found is None:
            slot = _Slot(self._slots[number % SLOTS])
            load = self._load
            receives = [
                packet
                for rank, bundle in load.bundles(load.receives, number)
                for packet in self._of(rank, bundle, slot, self._found)
            ]
            sends = [
                packet
                for rank, bundle in load.bundles(load.sends, number)
                for packet in self._of(rank, bundle, slot, self._source)
            ]
            found = self._rounds[number] = receives, sends
        return found

    def _of(self, rank: int, bundle: Bundle, slot: _Slot, view: Callable[[Part], torch.Tensor | None]) -> list[_Packet]:
        found = []
        for part in bundle.alone:
            lying = view(part)
            if lying is not None and self._fits(lying, part):
                found.append(_Packet(rank, as_bytes(lying), [(None, lying, part)]))
            else:
                buffer = slot.take(part.nbytes)
                found.append(_Packet(rank, buffer, [(self._place(buffer, part), lying, part)]))
        if bundle.packed:
            buffer, begin, parts = slot.take(bundle.packed_bytes), 0, []
            for part in bundle.packed:
                place = self._place(buffer[begin : begin + part.nbytes], part)
                parts.append((place, view(part), part))
                begin += aligned(part.nbytes)
            found.append(_Packet(rank, buffer, parts))
        return found

    def _place(self, buffer: torch.Tensor, part: Part) -> torch.Tensor:
        return buffer.view(self._load.dtypes[part.route]).view(part.sizes)

    def _fits(self, lying: torch.Tensor, part: Part) -> bool:
        """Whether this memory can be sent, or received into, as it lies."""
        same = lying.dtype == self._load.dtypes[part.route] and lying.device.type == self._wire.device.type
        return same and lying.is_contiguous() and is_as_it_lies(lying)


class _Slot:
    """Memory of which messages take their part, one behind another."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory, self._used = memory, 0

    def take(self, nbytes: int) -> torch.Tensor:
        """The next bytes."""
        begin, self._used = self._used, self._used + aligned(nbytes)
        return self._memory[begin : begin + nbytes]
