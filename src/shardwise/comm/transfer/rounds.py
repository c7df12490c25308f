"""Rounds: segments packed, sent and unpacked, several rounds at a time, so that these overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from shardwise.comm.transfer.copies import Copies, Packed, Packer, Pair
from shardwise.comm.transfer.segments import Load, Piece
from shardwise.comm.transfer.views import as_bytes, copy, fits
from shardwise.comm.transfer.wire import Buffer, PendingWork, Wire

View = Callable[[Piece], torch.Tensor]  # where a piece lies on this rank
Arrived = Callable[[Sequence[Piece]], object]
MOST_KEPT = 200_000  # pieces whose places are found once; of more, in every run
_Spot = tuple[Piece, torch.Tensor | None, torch.Tensor | None]  # its place in a buffer, if any, and where it lies


def ignore(pieces: Sequence[Piece]) -> None:
    """Nobody asks which pieces have arrived."""


@dataclass(frozen=True, eq=False)
class _Arrival:
    """What is to be done with pieces that have come."""

    pieces: Sequence[Piece]
    copies: Copies  # of those whose memory is the same in every run
    others: Sequence[tuple[Piece, torch.Tensor]]  # with where they have come


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A round, with its memory."""

    receives: Sequence[Buffer]
    sends: Packed
    arrival: _Arrival


class Rounds:
    """A load that is moved over a wire, once or as often as one likes, through the same buffers."""

    def __init__(
        self,
        load: Load,
        wire: Wire,
        source: View,
        target: View,
        *,
        pinned: bool,
        fixed: Callable[[Piece], bool],
        reused: bool = True,
        write: Callable[[torch.Tensor, torch.Tensor], object] = copy,
    ) -> None:
        """``fixed`` says whether the memory of a piece of the target is the same in every run, and written to once:
        then its place is found once, and if it lies in one run, it is received there, and not through a buffer. Others
        are written by ``write``. What is found out once is kept if the load is ``reused``."""
        self._load, self._wire, self._write = load, wire, write
        self._source, self._target, self._fixed = source, target, fixed
        self._pinned, self._reused, self._packer = pinned, reused, Packer()
        self._count = min(load.limits.slots, len(load.rounds))
        self._slots: dict[int, torch.Tensor] = {}
        self._known: dict[int, _Prepared] = {}
        self._own: _Arrival | None = None
        self._keeps = reused and len(load) <= MOST_KEPT
        self._next = 0  # the round that is begun next
        self._under_way: list[tuple[PendingWork, _Arrival]] = []

    @cached_property
    def buffered(self) -> int:
        """The bytes of all buffers, at most."""
        return self._load.limits.slots * self._room

    @cached_property
    def _room(self) -> int:
        return max((one.nbytes for one in self._load.rounds), default=0)

    def prepare(self) -> None:
        """Make the buffers, unless they are there."""
        for number in range(self._count):
            self._memory(number)

    def _memory(self, number: int) -> torch.Tensor:
        found = self._slots.get(number)
        if found is None:
            found = torch.empty(self._room, dtype=torch.uint8, device=self._wire.device, pin_memory=self._pinned)
            self._slots[number] = found
        return found

    def run(self, arrived: Arrived) -> None:
        """Until all is in its place; on an accelerator, until all is in its stream. Tells which pieces are there."""
        try:
            self.start(arrived)
            self.finish(arrived)
        except BaseException:
            self._slots, self._known, self._under_way = {}, {}, []  # messages may come into them yet
            raise

    def start(self, arrived: Arrived = ignore) -> None:
        """Begin as many rounds as there are buffers for, and copy what stays on this rank."""
        self._next = 0
        if self._wire.device.type != "cpu" and self._keeps:  # to find places waits for the device: so before it has
            self._staying()  # messages
            for number in range(len(self._load.rounds)):
                self._round(number)
        if not self._load.rounds:
            self._deliver(self._staying(), arrived)
        self.go_on(arrived)

    @property
    def under_way(self) -> list[PendingWork]:
        """The messages that are under way."""
        return [pending for pending, _ in self._under_way]

    def go_on(self, arrived: Arrived = ignore) -> None:
        """Begin the next rounds, as many as there are buffers for."""
        while self._next < len(self._load.rounds) and len(self._under_way) < self._count:
            one = self._round(self._next)
            self._under_way.append((self._wire.exchange(one.receives, self._packer.packed(one.sends)), one.arrival))
            self._next += 1
            if self._next == 1:
                self._deliver(self._staying(), arrived)  # while the first messages travel

    def finish(self, arrived: Arrived = ignore) -> None:
        """Go through all rounds that are left."""
        while self._under_way:
            pending, arrival = self._under_way.pop(0)
            pending.wait()
            self._deliver(arrival, arrived)
            self.go_on(arrived)

    def drop(self) -> None:
        """Forget what is under way: nobody wants it any more."""
        self._under_way = []

    def _deliver(self, arrival: _Arrival, arrived: Arrived) -> None:
        arrival.copies.make()
        for piece, place in arrival.others:
            self._write(self._target(piece), place)
        arrived(arrival.pieces)

    def _round(self, number: int) -> _Prepared:
        found = self._known.get(number)
        if found is None:
            found = self._prepared(number)
            if self._keeps:
                self._known[number] = found
        return found

    def _staying(self) -> _Arrival:
        """What stays on this rank."""
        if self._own is not None:
            return self._own
        found = self._arrival([(piece, self._source(one), self._place_of(piece)) for one, piece in self._load.kept])
        if self._keeps:
            self._own = found
        return found

    def _prepared(self, number: int) -> _Prepared:
        """The messages of a round, and where all of it lies."""
        one, slot = self._load.rounds[number], _Slot(self, number % self._count)
        receives: list[Buffer] = []
        arriving: list[_Spot] = []
        for rank, segment in one.receives:
            for memory, inside in self._messages(self._load.receives.of(segment), slot, self._place_of):
                receives.append((rank, memory))
                arriving += inside
        sends: list[tuple[list[Pair], Buffer]] = []
        for rank, segment in one.sends:
            for memory, inside in self._messages(self._load.sends.of(segment), slot, self._source):
                pairs = [(place, lying) for _, place, lying in inside if place is not None and lying is not None]
                sends.append((pairs, (rank, memory)))
        if self._wire.device.type != "cpu" and sends:  # all at once, as few kernels
            every = [pair for pairs, _ in sends for pair in pairs]
            sends = [(every if not k else [], message) for k, (_, message) in enumerate(sends)]
        packed = [(self._copies(pairs) if pairs else None, message) for pairs, message in sends]
        return _Prepared(receives, packed, self._arrival(arriving))

    def _arrival(self, spots: Sequence[_Spot]) -> _Arrival:
        pairs = [(lying, place) for _, place, lying in spots if place is not None and lying is not None]
        others = [(piece, place) for piece, place, lying in spots if place is not None and lying is None]
        return _Arrival([piece for piece, _, _ in spots], self._copies(pairs), others)

    def _copies(self, pairs: Sequence[Pair]) -> Copies:
        return Copies(pairs, fused=self._reused)

    def _place_of(self, piece: Piece) -> torch.Tensor | None:
        """Where a piece of the target lies, if that is fixed."""
        return self._target(piece) if self._fixed(piece) else None

    def _messages(
        self, pieces: Sequence[Piece], slot: _Slot, view: Callable[[Piece], torch.Tensor | None]
    ) -> Iterator[tuple[torch.Tensor, list[_Spot]]]:
        """The messages of a segment, each with the pieces in it: those that are alone, and one of all others."""
        for piece in pieces:
            if piece.alone:
                lying = view(piece)
                if lying is not None and fits(lying, self._load.dtypes[piece.plan], self._wire.device):
                    yield as_bytes(lying), [(piece, None, lying)]
                else:
                    memory = slot.take(piece.nbytes)
                    yield memory, [(piece, self._shaped(memory, piece), lying)]
        packed = [piece for piece in pieces if not piece.alone]
        if packed:
            aligned = self._load.aligned
            memory, begin = slot.take(sum(aligned(piece.nbytes) for piece in packed)), 0
            inside: list[_Spot] = []
            for piece in packed:
                inside.append((piece, self._shaped(memory[begin : begin + piece.nbytes], piece), view(piece)))
                begin += aligned(piece.nbytes)
            yield memory, inside

    def _shaped(self, memory: torch.Tensor, piece: Piece) -> torch.Tensor:
        return memory.view(self._load.dtypes[piece.plan]).view(piece.sizes)


class _Slot:
    """The buffer of a round, of which messages take their part, one behind another."""

    def __init__(self, rounds: Rounds, number: int) -> None:
        self._rounds, self._number, self._used = rounds, number, 0

    def take(self, nbytes: int) -> torch.Tensor:
        """The next bytes."""
        begin, self._used = self._used, self._used + self._rounds._load.aligned(nbytes)
        return self._rounds._memory(self._number)[begin : begin + nbytes]
