"""Sending what a plan says, as it lies where it lies contiguously, packed where not.

All that one rank has for another is one message. The messages go in one exchange of bytes, straight from the source
and into the destination if their memory is in the right order. Under a limit of extra memory they are cut into segments
that go in rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import P2POp, ProcessGroup

from shardwise.errors import TransferError
from shardwise.layout import Layout
from shardwise.meeting import Post, given_up, is_tagged, leave_word, ledger_of, look, lost, watch
from shardwise.process_group import begin_sending, is_fake, rank_array, sends, without_data
from shardwise.transfer.plan import Plan
from shardwise.transfer.unsent import Done, Tell, copy_own, tell_all
from shardwise.transfer.views import Piece, as_bytes, copy, is_as_it_lies, source_views, target_views
from shardwise.transfer.wire import Exchanging, exchange, said_of

Write = Callable[[torch.Tensor, torch.Tensor], object]  # into a view of the destination, what arrived for it
Ready = Callable[[], int]  # called once, after packing and before anything is sent; gives the tag of the data


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


class _Carrier:
    """What both ways of sending need: the wire, buffers on it, and how what arrives is written."""

    def __init__(self, plan: Plan, outs: list[torch.Tensor], group: ProcessGroup, dtype: torch.dtype) -> None:
        self.outs = outs
        self._plan, self._group, self._dtype = plan, group, dtype
        self._rank = dist.get_rank()
        self._wire = wire_device(plan, group)
        self._staged = self._wire.type == "cpu" and "cuda" in _device_types(plan)  # through pinned memory of the host
        self._write: Write = torch.Tensor.add_ if plan.sums else copy

    def _empty(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=self._dtype, device=self._wire, pin_memory=self._staged)

    def _fits(self, tensor: torch.Tensor) -> bool:
        """Whether this memory can be sent, or received into, as it lies."""
        same = tensor.dtype == self._dtype and tensor.device.type == self._wire.type
        return same and tensor.is_contiguous() and is_as_it_lies(tensor)

    def _packed(self, pieces: Sequence[Piece]) -> torch.Tensor:
        buffer = self._empty(sum(piece.count for piece in pieces))
        position = 0
        for piece in pieces:
            copy(buffer[position : position + piece.count].view(piece.view.shape), piece.view)
            position += piece.count
        return buffer

    def _unpack(self, buffer: torch.Tensor, pieces: Sequence[Piece]) -> None:
        position = 0
        for piece in pieces:
            arrived = buffer[position : position + piece.count].view(piece.view.shape)
            self._write(piece.view, arrived.to(piece.view.device) if self._plan.sums else arrived)
            position += piece.count

    def _lost(self, what: str, count: int, error: Exception) -> TransferError:
        size = count * self._dtype.itemsize
        return lost(f"{what} {size:,} bytes of a tensor on its way to another layout", error, self._group)


class AllToAll(_Carrier):
    """A transfer in which every rank of the group takes part, in one exchange."""

    def __init__(
        self,
        plan: Plan,
        tensors: Sequence[torch.Tensor],
        outs: list[torch.Tensor],
        group: ProcessGroup,
        dtype: torch.dtype,
        ready: Ready,
        *,
        owned: bool,
    ) -> None:
        super().__init__(plan, outs, group, dtype)
        members = rank_array(group)
        out_going, in_coming = (side(self._rank).ordered(members) for side in (plan.sends, plan.receives))
        sends, receives = source_views(out_going.pieces, plan, tensors), target_views(in_coming.pieces, plan, outs)
        source = self._as_it_lies(sends, tensors)
        # What the caller owns is not received into: after an error, messages that are late might still come.
        target = None if plan.sums or not owned else self._as_it_lies(receives, outs)
        copies: list[tuple[Piece, Piece]] = []
        into, out = ([n * dtype.itemsize for n in side.counts] for side in (out_going, in_coming))
        if source is None and target is None:
            # Our own pieces need not go through the collective, which would only copy them.
            mine = [side.pieces.run_of(self._rank) for side in (out_going, in_coming)]
            copies = list(zip(sends[mine[0]], receives[mine[1]], strict=True))
            del sends[mine[0]], receives[mine[1]]
            for split in (into, out):
                split[out_going.number_of(self._rank)] = 0
        given = as_bytes(self._packed(sends) if source is None else source)
        self._pieces = receives
        self._arrived = self._empty(sum(piece.count for piece in self._pieces)) if target is None else None
        taken = as_bytes(target if self._arrived is None else self._arrived)  # type: ignore[arg-type] # one is there
        tag = ready()
        self._count = given.numel() // dtype.itemsize
        self._exchange = self._begin(taken, given, out, into, tag)
        for one, other in copies:
            self._write(other.view, one.view)

    def _begin(self, taken: torch.Tensor, given: torch.Tensor, out: list[int], into: list[int], tag: int) -> Exchanging:
        try:
            return exchange(self._group, taken, given, out, into, tag)
        except RuntimeError as error:
            raise self._lost("exchange", self._count, error) from error

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
        """Finish: unpack what has arrived, unless it arrived in its place."""
        try:
            self._exchange.wait()
        except (RuntimeError, TimeoutError) as error:
            if isinstance(error, TransferError) or hasattr(error, "told_to"):
                raise
            raise self._lost("exchange", self._count, error) from error
        if self._arrived is not None:
            try:
                with torch.no_grad():
                    self._unpack(self._arrived, self._pieces)
            except Exception as error:
                _failed_alone(self._group, error)
                raise
            self._arrived = None
        return self.outs


# In the order in which they were begun, which is the same on every rank; ranks may be threads of one process.
_unfinished: list[PointToPoint] = []


class PointToPoint(_Carrier):
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
        self._under_way: list[tuple[dist.Work | Post, Segment, bool]] = []
        self._round = 0
        self._tag = ready()
        self._epoch, self._is_given_up = ledger_of(group).epoch, False
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
                first = next(other for other in _unfinished if other._rank == self._rank)
                if ledger_of(first._group).epoch == first._epoch:
                    first._finish_all()
                else:  # the other ranks may have given it up
                    _unfinished.remove(first)
                    first._is_given_up = True
        if self._is_given_up:
            raise given_up()
        return self.outs

    def _finish_all(self) -> None:
        _unfinished.remove(self)
        try:
            while self._round < self._rounds or self._under_way:
                self._finish()
                self._start()
        except Exception as error:
            _failed_alone(self._group, error)
            raise

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
            work = self._attempt("receive from", segment, True, self._receive_buffer(segment))
            self._under_way.append((work, segment, True))
        for segment in sends:
            work = self._attempt("send to", segment, False, self._send_buffer(segment))
            self._under_way.append((work, segment, False))

    def _start_batch(self, receives: list[Segment], sends: list[Segment]) -> None:
        operations = [P2POp(dist.irecv, self._receive_buffer(s), s.peer, self._group) for s in receives]
        operations += [P2POp(dist.isend, self._send_buffer(s), s.peer, self._group) for s in sends]
        works = dist.batch_isend_irecv(operations) if operations else []
        for work in works:
            watch(work, self._group)
            work.wait()  # enqueued on the stream: the host does not wait
        for segment in receives:
            self._land(segment)

    def _attempt(self, what: str, segment: Segment, receiving: bool, buffer: torch.Tensor) -> dist.Work | Post:
        try:
            if is_tagged(self._group):
                post, peer = Post(self._group), dist.get_group_rank(self._group, segment.peer)
                (post.receive if receiving else post.send)(buffer, peer, self._tag)
                return post
            work = (dist.irecv if receiving else dist.isend)(buffer, segment.peer, group=self._group)
        except RuntimeError as error:
            raise self._lost(f"{what} rank {segment.peer}", segment.count, error) from error
        assert work is not None, "only an outsider of the group gets no work, and it has no pieces"
        return work

    def _finish(self) -> None:
        """Wait for the round that is under way and unpack it as it arrives."""
        for work, segment, receiving in self._under_way:
            try:
                if isinstance(work, Post):
                    work.wait(lambda peers: look(self._group, peers, self._epoch))
                else:
                    work.wait()
            except (RuntimeError, TimeoutError) as error:
                if hasattr(error, "told_to"):
                    raise
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
    ready: Callable[[], object] = lambda: None,
    fill: Any = None,
    tell: Tell | None = None,
    verb: str = "a transfer",
) -> Moving:
    """Begin to move this rank's tensors of the source layout into tensors of the destination layout.

    Every rank of the group calls it. ``outs`` are the destination's tensors, made here when not given. Elements that
    nothing is moved to hold ``fill``, if there are any. With ``tell``, the data goes that way. The verb is what errors
    call it.
    """
    if plan.moved and tell is None and not is_fake(process_group) and not without_data():
        return _begun(plan, tensors, process_group, dtype, outs, max_bytes, ready, fill, verb)
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
    ready: Callable[[], object],
    fill: Any,
    verb: str,
) -> Moving:
    """A transfer in which something is sent. The other ranks count on this one from now on."""
    owned = outs is None

    def all_are_ready() -> int:
        ready()
        return begin_sending(group, said_of(plan, dtype, max_bytes, verb))

    try:
        with torch.no_grad():
            if outs is None:
                outs = empty_tensors(plan.dst, dtype, fill=0 if plan.sums else fill)
            if max_bytes is None or not sends(group):
                return AllToAll(plan, tensors, outs, group, dtype, all_are_ready, owned=owned or not is_tagged(group))
            return PointToPoint(plan, tensors, outs, group, dtype, all_are_ready, max_bytes)
    except Exception as error:
        _failed_alone(group, error)
        raise


def _failed_alone(group: ProcessGroup, error: Exception) -> None:
    """Let the others know that data will not come, such as for lack of memory; unless they know, or a rank is gone."""
    if not hasattr(error, "told_to") and not isinstance(error, TransferError):
        leave_word(group, error)


def empty_tensors(layout: Layout, dtype: torch.dtype, *, fill: Any = None) -> list[torch.Tensor]:
    """New local tensors for this rank's boxes of a layout, filled with a value if one is given."""
    made = [
        torch.empty(layout.extent(row), dtype=dtype, device=layout.place(row).device)
        for row in layout.rows_on(dist.get_rank())
    ]
    return made if fill is None else [tensor.fill_(fill) for tensor in made]


def wire_device(plan: Plan, process_group: ProcessGroup) -> torch.device:
    """Where buffers must lie to be sent: decided by the layouts and the group, so the same at both ends."""
    backends = {device.type for device in process_group._device_types}
    kinds = _device_types(plan)
    accelerators = backends - {"cpu"}
    if dist.get_backend(process_group) == "gloo" or (kinds == {"cpu"} and "cpu" in backends) or not accelerators:
        return torch.device("cpu")  # gloo would abort if handed memory of another device
    kind = accelerators.pop()
    return torch.device(kind, torch.get_device_module(kind).current_device())


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


def _device_types(plan: Plan) -> frozenset[str]:
    return plan.src.places.device_types | plan.dst.places.device_types
