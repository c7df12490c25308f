"""Sending what a plan says, as it lies where it lies contiguously, packed where not.

All that one rank has for another is one message. The messages go in one all-to-all of bytes, straight from the source
and into the destination if their memory is in the right order. Under a limit of extra memory they go point to point,
cut into segments that go in rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import P2POp, ProcessGroup

from shardwise.layout import Layout
from shardwise.process_group import is_fake, rank_array, sends, without_data
from shardwise.transfer.carrier import Carrier
from shardwise.transfer.collectives import own_collective
from shardwise.transfer.exchange import Ready, UnderWay, counted_on, exchanged, takes_lists
from shardwise.transfer.pieces import Ordered
from shardwise.transfer.plan import Plan
from shardwise.transfer.sums import write_sum
from shardwise.transfer.unsent import Done, Tell, copy_own, tell_all
from shardwise.transfer.views import Piece, as_bytes, copy, source_views, target_views


class Moving(Protocol):
    """A transfer under way."""

    def wait(self) -> list[torch.Tensor]:
        """Finish, and give the local tensors of the destination."""


@dataclass(slots=True)
class Segment:
    """Pieces that travel between this rank and one other in one go, and the buffer they travel in."""

    peer: int
    pieces: list[Piece]
    buffer: torch.Tensor | None = None

    @property
    def count(self) -> int:
        """Elements in all of its pieces."""
        return sum(piece.count for piece in self.pieces)


class AllToAll(Carrier):
    """A transfer in which every rank of the group takes part, in one exchange of messages."""

    def __init__(
        self,
        plan: Plan,
        tensors: Sequence[torch.Tensor],
        outs: list[torch.Tensor],
        group: ProcessGroup,
        dtype: torch.dtype,
        ready: Ready,
    ) -> None:
        super().__init__(plan, outs, group, dtype)
        members = rank_array(group)
        out_going, in_coming = (side(self._rank).ordered(members) for side in (plan.sends, plan.receives))
        self._sends = source_views(out_going.pieces, plan, tensors)
        self._receives = target_views(in_coming.pieces, plan, outs)
        lists, mine = takes_lists(self._wire), out_going.number_of(self._rank)
        source = None if lists else self._as_it_lies(self._sends, tensors)
        target = None if lists or plan.sums else self._as_it_lies(self._receives, outs)
        # Our own pieces need not be sent, which would only copy them, unless they lie between others.
        self._own = None if source is not None or target is not None else mine
        given = self._given(out_going, source, lists)
        taken = self._taken(in_coming, target, lists)
        ready()
        self._way: UnderWay | None = exchanged(group, self._wire, given, taken)
        if self._own is not None and not plan.sums:
            for one, other in zip(*self._own_pieces(out_going, in_coming), strict=True):
                copy(other.view, one.view)
        self._own_sources = self._own_pieces(out_going, in_coming)[0] if self._own is not None else []
        self._alike = in_coming.pieces.meetings if plan.sums else None
        self._sends = []

    def _own_pieces(self, *sides: Ordered) -> list[list[Piece]]:
        runs = [dict(side.runs).get(self._own, slice(0)) for side in sides]  # type: ignore[arg-type] # of a member
        return [pieces[run] for pieces, run in zip((self._sends, self._receives), runs, strict=True)]

    def _given(self, side: Ordered, source: torch.Tensor | None, lists: bool) -> list[torch.Tensor]:
        """The message to each rank: as it lies if it may, else packed; what several ranks get is packed once."""
        given = [self._empty(0)] * len(side.members)
        if source is not None:
            return list(source.view(-1).split_with_sizes(side.counts))
        runs = [(number, run) for number, run in side.runs if number != self._own]
        if lists:
            packed: dict[int, torch.Tensor] = {}
            first = dict(zip((number for number, _ in side.runs), side.alike, strict=True))
            for number, run in runs:
                if first[number] not in packed:
                    packed[first[number]] = self._message(self._sends[run])
                given[number] = packed[first[number]]
            return given
        buffer = self._packed([piece for _, run in runs for piece in self._sends[run]])
        for (number, _), part in zip(runs, buffer.split_with_sizes([side.counts[n] for n, _ in runs]), strict=True):
            given[number] = part
        return given

    def _taken(self, side: Ordered, target: torch.Tensor | None, lists: bool) -> list[torch.Tensor]:
        """Where the message of each rank goes: into its place if it lies there whole, else into a buffer."""
        taken = [self._empty(0)] * len(side.members)
        self._arrived: list[tuple[slice, torch.Tensor]] = []
        if target is not None:
            return list(target.view(-1).split_with_sizes(side.counts))
        runs = [(number, run) for number, run in side.runs if number != self._own]
        far = []
        for number, run in runs:
            straight = self._straight(self._receives[run]) if lists and not self._plan.sums else None
            if straight is None:
                far.append((number, run))
            else:
                taken[number] = straight
        counts = [side.counts[number] for number, _ in far]
        for (number, run), part in zip(far, self._empty(sum(counts)).split_with_sizes(counts), strict=True):
            taken[number] = part
            self._arrived.append((run, part))
        return taken

    def _message(self, pieces: Sequence[Piece]) -> torch.Tensor:
        straight = self._straight(pieces)
        return self._packed(pieces) if straight is None else straight

    def _straight(self, pieces: Sequence[Piece]) -> torch.Tensor | None:
        """The memory of the one piece, if it can go as it lies."""
        return pieces[0].view.view(-1) if len(pieces) == 1 and self._fits(pieces[0].view) else None

    def _as_it_lies(self, pieces: list[Piece], tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The one local tensor whose memory, as it lies, is all the pieces one after the other; if there is one."""
        if len(tensors) != 1 or not self._fits(tensors[0]):
            return None
        position = tensors[0].storage_offset()
        for piece in pieces:
            if not piece.view.is_contiguous() or (piece.count and piece.view.storage_offset() != position):
                return None
            position += piece.count
        return tensors[0].detach() if position == tensors[0].storage_offset() + tensors[0].numel() else None

    def wait(self) -> list[torch.Tensor]:
        """Finish: unpack what has arrived, unless it arrived in its place, or add it up."""
        if self._way is None:
            return self.outs
        self._way.wait()
        self._way = None
        with torch.no_grad():
            if self._plan.sums:
                self._add_up()
            else:
                for run, buffer in self._arrived:
                    self._unpack(buffer, self._receives[run])
        self._arrived, self._own_sources, self._receives = [], [], []
        return self.outs

    def _add_up(self) -> None:
        """Write the sums of what has come for each part of the destination, in order of the ranks."""
        came: list[Any] = [None] * len(self._receives)
        for run, buffer in self._arrived:
            pieces = self._receives[run]
            parts = buffer.split_with_sizes([piece.count for piece in pieces])
            came[run] = [part.view(piece.view.shape) for part, piece in zip(parts, pieces, strict=True)]
        own = iter(self._own_sources)
        parts_in_order = [next(own).view if part is None else part for part in came]
        alike = self._alike
        reached = sum(self._receives[numbers[0]].count for numbers in alike or ())
        if reached != sum(out.numel() for out in self.outs):
            for out in self.outs:
                out.zero_()
        if alike is None:
            for piece, part in zip(self._receives, parts_in_order, strict=True):
                piece.view.add_(part.to(piece.view.device))
        for numbers in alike or ():
            write_sum(self._receives[numbers[0]].view, [parts_in_order[number] for number in numbers])


# In the order in which they were begun, which is the same on every rank; ranks may be threads of one process.
_unfinished: list[PointToPoint] = []


class PointToPoint(Carrier):
    """A transfer in rounds, under a limit of extra memory."""

    def __init__(
        self,
        plan: Plan,
        tensors: Sequence[torch.Tensor],
        outs: list[torch.Tensor],
        group: ProcessGroup,
        dtype: torch.dtype,
        ready: Ready,
        max_bytes: int,
    ) -> None:
        super().__init__(plan, outs, group, dtype)
        # So large may a segment be that no rank ever holds more than the limit in buffers.
        most = max(max_bytes // (max(plan.most_peers, 1) * dtype.itemsize), 1)
        rank = self._rank
        sends, receives = plan.sends(rank), plan.receives(rank)
        sources, targets = source_views(sends.of(rank), plan, tensors), target_views(receives.of(rank), plan, outs)
        self._copies = list(zip(sources, targets, strict=True))
        self._sends = {
            peer: _segments(peer, source_views(sends.of(peer), plan, tensors, most), most)
            for peer in plan.destinations(rank)
        }
        self._receives = {
            peer: _segments(peer, target_views(receives.of(peer), plan, outs, most), most)
            for peer in plan.sources(rank)
        }
        self._rounds = max((len(s) for s in (*self._sends.values(), *self._receives.values())), default=0)
        self._under_way: list[tuple[dist.Work, Segment, bool]] = []
        self._round = 0
        ready()
        _unfinished.append(self)  # kept until done, even if nobody waits: its buffers are on the wire
        self._start()
        while self._wire.type != "cpu" and self._round < self._rounds:
            self._start()  # NCCL works in order of the calls, so all are made now; the host does not wait

    def wait(self) -> list[torch.Tensor]:
        """Finish: unpack what arrives, in further rounds if need be.

        What was begun earlier is finished first, whoever waits for it, so that all ranks go through their rounds in the
        same order.
        """
        with torch.no_grad():
            while self in _unfinished:
                next(other for other in _unfinished if other._rank == self._rank)._finish_all()
        return self.outs

    def _finish_all(self) -> None:
        _unfinished.remove(self)
        while self._round < self._rounds or self._under_way:
            self._finish()
            self._start()

    def _start(self) -> None:
        """Begin the next round, and do the local copies while the first one travels."""
        if self._round < self._rounds:
            receives = [s[self._round] for s in self._receives.values() if self._round < len(s)]
            sends = [s[self._round] for s in self._sends.values() if self._round < len(s)]
            self._round += 1
            if self._wire.type != "cpu":  # NCCL wants sends and receives that wait for each other in one batch
                self._start_batch(receives, sends)
            else:
                self._start_each(receives, sends)
        for source, target in self._copies:
            self._write(target.view, source.view)
        self._copies = []

    def _start_each(self, receives: list[Segment], sends: list[Segment]) -> None:
        for segment in receives:
            work = self._attempt("receive from", segment, dist.irecv, self._receive_buffer(segment))
            self._under_way.append((work, segment, True))
        for segment in sends:
            work = self._attempt("send to", segment, dist.isend, self._send_buffer(segment))
            self._under_way.append((work, segment, False))

    def _start_batch(self, receives: list[Segment], sends: list[Segment]) -> None:
        operations = [P2POp(dist.irecv, self._receive_buffer(s), s.peer, self._group) for s in receives]
        operations += [P2POp(dist.isend, self._send_buffer(s), s.peer, self._group) for s in sends]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()  # enqueued on the stream: the host does not wait
        for segment in receives:
            self._land(segment)

    def _attempt(
        self, what: str, segment: Segment, function: Callable[..., dist.Work | None], buffer: torch.Tensor
    ) -> dist.Work:
        try:
            work = function(buffer, segment.peer, group=self._group)
        except RuntimeError as error:
            raise self._lost(f"{what} rank {segment.peer}", segment.count, error) from error
        assert work is not None, "only an outsider of the group gets no work, and it has no pieces"
        return work

    def _finish(self) -> None:
        """Wait for the round that is under way and unpack it as it arrives."""
        for work, segment, receiving in self._under_way:
            try:
                work.wait()
            except RuntimeError as error:
                what = "receive from" if receiving else "send to"
                raise self._lost(f"{what} rank {segment.peer}", segment.count, error) from error
            if receiving:
                self._land(segment)
            segment.buffer = None
        self._under_way = []

    def _send_buffer(self, segment: Segment) -> torch.Tensor:
        if len(segment.pieces) == 1 and self._fits(segment.pieces[0].view):
            return as_bytes(segment.pieces[0].view)
        segment.buffer = self._packed(segment.pieces)
        return as_bytes(segment.buffer)

    def _receive_buffer(self, segment: Segment) -> torch.Tensor:
        if not self._plan.sums and len(segment.pieces) == 1 and self._fits(segment.pieces[0].view):
            return as_bytes(segment.pieces[0].view)
        segment.buffer = self._empty(segment.count)
        return as_bytes(segment.buffer)

    def _land(self, segment: Segment) -> None:
        """What arrived in a buffer goes to its place; what arrived in its place is there."""
        if segment.buffer is not None:
            self._unpack(segment.buffer, segment.pieces)


def move(
    plan: Plan,
    tensors: Sequence[torch.Tensor],
    process_group: ProcessGroup,
    *,
    dtype: torch.dtype,
    outs: list[torch.Tensor] | None = None,
    max_bytes: int | None = None,
    ready: Ready = lambda: None,
    fill: Any = None,
    tell: Tell | None = None,
) -> Moving:
    """Begin to move this rank's tensors of the source layout into tensors of the destination layout.

    Every rank of the group calls it. ``outs`` are the destination's tensors, made here when not given. Elements that
    nothing is moved to hold ``fill``, if there are any; where a plan sums, they hold 0, and nothing of what ``outs``
    held before is added. With ``tell``, the data goes that way.
    """
    if plan.moved and tell is None and not is_fake(process_group) and not without_data():
        return _begun(plan, tensors, process_group, dtype, outs, max_bytes, ready, fill)
    if outs is None:
        outs = empty_tensors(plan.dst, dtype, fill=0 if plan.sums else fill)
    with torch.no_grad():
        if without_data():
            ready()
            return Done(outs)  # as they would be
        if tell is not None:
            return tell_all(plan, tensors, outs, process_group, dtype, tell)
        ready()
        return copy_own(plan, tensors, outs)


def _begun(
    plan: Plan,
    tensors: Sequence[torch.Tensor],
    group: ProcessGroup,
    dtype: torch.dtype,
    outs: list[torch.Tensor] | None,
    max_bytes: int | None,
    ready: Ready,
    fill: Any,
) -> Moving:
    """A transfer in which something is sent. The other ranks count on this one from now on."""
    with counted_on(group, ready) as all_are_ready:
        if outs is None:
            outs = empty_tensors(plan.dst, dtype, fill=None if plan.sums else fill)
        if max_bytes is None or not sends(group):
            carrier = own_collective(plan, group, dtype) or AllToAll
            return carrier(plan, tensors, outs, group, dtype, all_are_ready)
        if plan.sums:
            for out in outs:
                out.zero_()
        return PointToPoint(plan, tensors, outs, group, dtype, all_are_ready, max_bytes)


def empty_tensors(layout: Layout, dtype: torch.dtype, *, fill: Any = None) -> list[torch.Tensor]:
    """New local tensors for this rank's boxes of a layout, filled with a value if one is given."""
    made = [
        torch.empty(layout.extent(row), dtype=dtype, device=layout.place(row).device)
        for row in layout.rows_on(dist.get_rank())
    ]
    return made if fill is None else [tensor.fill_(fill) for tensor in made]


def _segments(peer: int, pieces: list[Piece], most: int) -> list[Segment]:
    """A message in segments of at most so many elements."""
    segments: list[Segment] = []
    room = 0
    for piece in pieces:
        if piece.count > room or not segments:
            segments.append(Segment(peer, []))
            room = most
        segments[-1].pieces.append(piece)
        room -= piece.count
    return segments
