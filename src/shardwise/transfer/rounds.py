"""Sending what a plan says under a limit of extra memory: point to point, in segments that go in rounds.

The memory of the CPU is sent round by round while somebody waits. A transfer that nobody can wait for any more, for its
handle was dropped, ends by itself in a thread, so that it keeps no memory and ranks that do wait get their data.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import P2POp, ProcessGroup

from shardwise.meeting import Post, given_up, is_tagged, keeper, ledger_of, look, watch
from shardwise.transfer.carrier import Carrier
from shardwise.transfer.exchange import Ready, failing_together
from shardwise.transfer.plan import TransferPlan
from shardwise.transfer.views import as_bytes, source_views, target_views


@dataclass(slots=True)
class Segment:
    """Pieces that travel between this rank and one other in one go, and the buffer they travel in."""

    peer: int
    pieces: list[torch.Tensor]
    buffer: torch.Tensor | None = None

    @property
    def count(self) -> int:
        """Elements in all of its pieces."""
        return sum(piece.numel() for piece in self.pieces)


# In the order in which they were begun, which is the same on every rank; ranks may be threads of one process.
_unfinished: list[PointToPoint] = []


class InRounds:
    """What a caller holds of a transfer in rounds. Once nobody holds it any more, the transfer ends by itself."""

    def __init__(self, transfer: PointToPoint) -> None:
        self._transfer = transfer

    def wait(self) -> list[torch.Tensor]:
        """Finish, and give the local tensors of the destination."""
        return self._transfer.wait()

    def __del__(self) -> None:
        self._transfer.let_go()


class PointToPoint(Carrier):
    """A transfer in rounds, under a limit of extra memory."""

    def __init__(
        self,
        plan: TransferPlan,
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
        self._keeper = keeper() if self._wire.type == "cpu" and is_tagged(group) else None
        self._stream = torch.cuda.current_stream() if self._staged else None  # in which copies to the host must be
        if self._wire.type == "cpu":
            if self._keeper is None:  # messages without tags are told apart by their order
                self._finish_earlier()
            _unfinished.append(self)  # kept until done: its buffers are on the wire
        try:
            self._start()
        except BaseException:
            self._take()
            raise
        while self._wire.type != "cpu" and self._round < self._rounds:
            self._start()  # NCCL works in order of the calls, so all are made now; the host does not wait

    def wait(self) -> list[torch.Tensor]:
        """Finish: unpack what arrives, in further rounds if need be.

        What was begun earlier is finished first, whoever waits for it, so that all ranks go through their rounds in the
        same order.
        """
        with torch.no_grad():
            while self in _unfinished:
                self._finish_first()
        if self._is_given_up:
            raise given_up()
        return self.outs

    def _finish_earlier(self) -> None:
        """What was begun in this group and is not finished, on all ranks alike."""
        while any(other._rank == self._rank and other._group is self._group for other in _unfinished):
            self._finish_first()

    def _finish_first(self) -> None:
        """Of all that this rank has begun."""
        first = next((other for other in tuple(_unfinished) if other._rank == self._rank), None)
        if first is None or not first._take():
            return
        if ledger_of(first._group).epoch == first._epoch:
            first._finish_all()
        else:  # the other ranks may have given it up
            first._is_given_up = True

    def _take(self) -> bool:
        """Whether it is the caller who finishes it: nobody else does, in any thread."""
        try:
            _unfinished.remove(self)
        except ValueError:
            return False
        return True

    def _finish_all(self) -> None:
        with failing_together(self._group):
            while self._round < self._rounds or self._under_way:
                self._finish()
                self._start()

    def let_go(self) -> None:
        """Nobody waits for it: have a thread finish it. The garbage collector calls this, at any moment."""
        if self._keeper is not None and self._take():
            self._keeper.take(self._posts(), self._next_alone)

    def _posts(self) -> list[Post]:
        return [work for work, _, _ in self._under_way if isinstance(work, Post)]

    def _next_alone(self) -> list[Post]:
        """Begin the next round, in a thread; what has arrived is for nobody."""
        for _, segment, _ in self._under_way:
            segment.buffer = None
        self._under_way = []
        if ledger_of(self._group).epoch != self._epoch:  # the other ranks may have given it up
            return []
        stream: AbstractContextManager[object]
        stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.no_grad(), failing_together(self._group), stream:
            self._start()
        return self._posts()

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
            self._write(target, source)
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
            self._raise_lost(f"{what} rank {segment.peer}", segment.count, error)
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
                what = "receive from" if receiving else "send to"
                self._raise_lost(f"{what} rank {segment.peer}", segment.count, error)
            if receiving:
                self._land(segment)
            segment.buffer = None
        self._under_way = []

    def _send_buffer(self, segment: Segment) -> torch.Tensor:
        if len(segment.pieces) == 1 and self._fits(segment.pieces[0]):
            return as_bytes(segment.pieces[0])
        segment.buffer = self._packed(segment.pieces)
        return as_bytes(segment.buffer)

    def _receive_buffer(self, segment: Segment) -> torch.Tensor:
        if not self._plan.sums and len(segment.pieces) == 1 and self._fits(segment.pieces[0]):
            return as_bytes(segment.pieces[0])
        segment.buffer = self._empty(segment.count)
        return as_bytes(segment.buffer)

    def _land(self, segment: Segment) -> None:
        """What arrived in a buffer goes to its place; what arrived in its place is there."""
        if segment.buffer is not None:
            self._unpack(segment.buffer, segment.pieces)


def _segments(peer: int, pieces: list[torch.Tensor], most: int) -> list[Segment]:
    """A message in segments of at most so many elements."""
    segments: list[Segment] = []
    room = 0
    for piece in pieces:
        if piece.numel() > room or not segments:
            segments.append(Segment(peer, []))
            room = most
        segments[-1].pieces.append(piece)
        room -= piece.numel()
    return segments
