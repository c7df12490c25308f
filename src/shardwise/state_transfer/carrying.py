"""Carrying: bundles packed, sent and unpacked, two turns at a time, so that these overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from shardwise.state_transfer.bundles import NO_PARTS, Part, Parts, aligned
from shardwise.state_transfer.packing import Packed, Packer
from shardwise.state_transfer.turns import Turn
from shardwise.state_transfer.wires import Message, Waiting, Wire
from shardwise.transfer.copies import Copies, Pair
from shardwise.transfer.views import as_bytes, copy, is_as_it_lies

View = Callable[[Part], torch.Tensor]  # where a part lies on this rank
Arrived = Callable[[Sequence[Part]], object]
SLOTS = 2  # turns that are under way at a time
MOST_KEPT = 200_000  # parts whose places are found once; of more, in every run
_Placed = tuple[Part, torch.Tensor | None, torch.Tensor | None]  # its place in a buffer, if any, and where it lies


@dataclass(frozen=True, eq=False)
class Load:
    """All that one rank sends, receives and keeps."""

    here: int
    sends: Parts
    receives: Parts
    turns: Sequence[Turn]
    dtypes: Sequence[torch.dtype]  # in which each route travels

    @property
    def kept(self) -> list[tuple[Part, Part]]:
        """What goes from this rank to itself: from where, and where to."""
        both = [[part for bundle in side.bundles.get(self.here, ()) for part in side.of(bundle)] for side in self.sides]
        return list(zip(*both, strict=True))

    @property
    def sides(self) -> tuple[Parts, Parts]:
        """Both."""
        return self.sends, self.receives


NOTHING = Load(0, NO_PARTS, NO_PARTS, (), ())


@dataclass(frozen=True, eq=False)
class _Landing:
    """What is to be done with parts that have come."""

    parts: Sequence[Part]
    copies: Copies  # of those whose memory is the same in every run
    others: Sequence[tuple[Part, torch.Tensor]]  # with where they have come


@dataclass(frozen=True, eq=False)
class _Ready:
    """A turn, with its memory."""

    receives: Sequence[Message]
    sends: Packed
    landing: _Landing


class Carrying:
    """A load that is carried over a wire, as often as one likes, through the same buffers."""

    def __init__(
        self, load: Load, wire: Wire, source: View, target: View, *, pinned: bool, lasts: Callable[[Part], bool]
    ) -> None:
        """``lasts`` says whether the memory of a part of the target is the same in every run: then its place is found
        once, and if it lies in one run, it is received there, and not through a buffer."""
        self._load, self._wire = load, wire
        self._source, self._target, self._lasts = source, target, lasts
        self._pinned, self._packer = pinned, Packer()
        self._slots: list[torch.Tensor] = []
        self._known: dict[int, _Ready] = {}
        self._kept: _Landing | None = None
        self._keeps = sum(map(len, load.sides)) <= MOST_KEPT

    @cached_property
    def buffered(self) -> int:
        """The bytes of its buffers, at most."""
        return SLOTS * self._room

    @cached_property
    def _room(self) -> int:
        return max((turn.nbytes for turn in self._load.turns), default=0)

    def prepare(self) -> None:
        """Make the buffers, unless they are there."""
        while len(self._slots) < min(SLOTS, len(self._load.turns)):
            self._slots.append(
                torch.empty(self._room, dtype=torch.uint8, device=self._wire.device, pin_memory=self._pinned)
            )

    def run(self, arrived: Arrived) -> None:
        """Until all is in its place; on an accelerator, until all is in its stream. Parts are told of then."""
        self.prepare()
        try:
            self._run(arrived)
        except BaseException:
            self._slots, self._known = [], {}  # messages may come into them yet
            raise

    def _run(self, arrived: Arrived) -> None:
        if self._wire.device.type != "cpu" and self._keeps:
            self._staying()  # to find places waits for the device: so before it has messages
            for number in range(len(self._load.turns)):
                self._turn(number)
        under_way: list[tuple[Waiting, _Landing]] = []
        for number in range(len(self._load.turns)):
            under_way.append(self._begin(number))
            if not number:
                self._land(self._staying(), arrived)  # while the first messages travel
            if len(under_way) == SLOTS:
                self._finish(*under_way.pop(0), arrived)
        if not self._load.turns:
            self._land(self._staying(), arrived)
        for each in under_way:
            self._finish(*each, arrived)

    def _begin(self, number: int) -> tuple[Waiting, _Landing]:
        turn = self._turn(number)
        return self._wire.exchange(turn.receives, self._packer.packed(turn.sends)), turn.landing

    def _turn(self, number: int) -> _Ready:
        turn = self._known.get(number)
        if turn is None:
            turn = self._readied(number)
            if self._keeps:
                self._known[number] = turn
        return turn

    def _finish(self, waiting: Waiting, landing: _Landing, arrived: Arrived) -> None:
        waiting.wait()
        self._land(landing, arrived)

    def _land(self, landing: _Landing, arrived: Arrived) -> None:
        landing.copies.make()
        for part, place in landing.others:
            copy(self._target(part), place)
        arrived(landing.parts)

    def _staying(self) -> _Landing:
        """What stays on this rank."""
        if self._kept is not None:
            return self._kept
        found = _landing([(part, self._source(one), self._found(part)) for one, part in self._load.kept])
        if self._keeps:
            self._kept = found
        return found

    def _readied(self, number: int) -> _Ready:
        """The messages of a turn, and where all of it lies."""
        turn, slot = self._load.turns[number], _Slot(self._slots[number % SLOTS])
        receives: list[Message] = []
        landing: list[_Placed] = []
        for rank, bundle in turn.receives:
            for memory, inside in self._messages(self._load.receives.of(bundle), slot, self._found):
                receives.append((rank, memory))
                landing += inside
        sends: list[tuple[list[Pair], Message]] = []
        for rank, bundle in turn.sends:
            for memory, inside in self._messages(self._load.sends.of(bundle), slot, self._source):
                pairs = [(place, lying) for _, place, lying in inside if place is not None and lying is not None]
                sends.append((pairs, (rank, memory)))
        if self._wire.device.type != "cpu" and sends:  # all at once, as few kernels
            every = [pair for pairs, _ in sends for pair in pairs]
            sends = [(every if not k else [], message) for k, (_, message) in enumerate(sends)]
        packed = [(Copies(pairs) if pairs else None, message) for pairs, message in sends]
        return _Ready(receives, packed, _landing(landing))

    def _found(self, part: Part) -> torch.Tensor | None:
        """Where a part of the target lies, if that lasts."""
        return self._target(part) if self._lasts(part) else None

    def _messages(
        self, parts: Sequence[Part], slot: _Slot, view: Callable[[Part], torch.Tensor | None]
    ) -> Iterator[tuple[torch.Tensor, list[_Placed]]]:
        """The messages of a bundle, each with the parts in it: those that are alone, and one of all others."""
        for part in parts:
            if part.alone:
                lying = view(part)
                if lying is not None and self._fits(lying, part):
                    yield as_bytes(lying), [(part, None, lying)]
                else:
                    memory = slot.take(part.nbytes)
                    yield memory, [(part, self._place(memory, part), lying)]
        packed = [part for part in parts if not part.alone]
        if packed:
            memory, begin = slot.take(sum(aligned(part.nbytes) for part in packed)), 0
            inside: list[_Placed] = []
            for part in packed:
                inside.append((part, self._place(memory[begin : begin + part.nbytes], part), view(part)))
                begin += aligned(part.nbytes)
            yield memory, inside

    def _place(self, memory: torch.Tensor, part: Part) -> torch.Tensor:
        return memory.view(self._load.dtypes[part.route]).view(part.sizes)

    def _fits(self, lying: torch.Tensor, part: Part) -> bool:
        """Whether this memory can be sent, or received into, as it lies."""
        same = lying.dtype == self._load.dtypes[part.route] and lying.device.type == self._wire.device.type
        return same and lying.is_contiguous() and is_as_it_lies(lying)


def _landing(placed: Sequence[_Placed]) -> _Landing:
    pairs = [(lying, place) for _, place, lying in placed if place is not None and lying is not None]
    others = [(part, place) for part, place, lying in placed if place is not None and lying is None]
    return _Landing([part for part, _, _ in placed], Copies(pairs), others)


class _Slot:
    """Memory of which messages take their part, one behind another."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory, self._used = memory, 0

    def take(self, nbytes: int) -> torch.Tensor:
        """The next bytes."""
        begin, self._used = self._used, self._used + aligned(nbytes)
        return self._memory[begin : begin + nbytes]
