"""Sending what a plan says: point to point, as it lies where it lies contiguously, packed where not.

All that one rank has for another is one message. It is received first and sent as soon as it is packed, so packing,
the wire and unpacking overlap. With a limit on extra memory, messages are cut into segments that go in rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import P2POp, ProcessGroup

from shardwise.errors import TransferError
from shardwise.layout import Layout
from shardwise.transfer.plan import Plan, cut

Write = Callable[[torch.Tensor, torch.Tensor], object]  # into a view of the destination, what arrived for it


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a local tensor: as a view, and its number of elements."""

    view: torch.Tensor
    count: int


@dataclass(slots=True)
class Segment:
    """Pieces that travel between this rank and one other in one go, and the buffer they travel in."""

    peer: int
    pieces: list[Piece]
    buffer: torch.Tensor | None = None
    in_place: bool = False  # the buffer is the piece itself

    @property
    def count(self) -> int:
        """Elements in all of its pieces."""
        return sum(piece.count for piece in self.pieces)


class Moving:
    """A transfer under way. `wait` gives the local tensors of the destination."""

    def __init__(
        self,
        plan: Plan,
        tensors: Sequence[torch.Tensor],
        outs: list[torch.Tensor],
        process_group: ProcessGroup,
        *,
        dtype: torch.dtype,
        max_bytes: int | None = None,
    ) -> None:
        self.outs = outs
        self._rank = dist.get_rank()
        self._group = process_group
        self._dtype = dtype
        self._wire = wire_device(plan, process_group)
        self._write: Write = torch.Tensor.add_ if plan.sums else torch.Tensor.copy_
        self._sums = plan.sums
        most = None if max_bytes is None else _segment_elements(plan, max_bytes, dtype.itemsize)
        rank = self._rank
        local = plan.pieces(rank, rank)
        self._copies = list(
            zip(
                _pieces(plan, local, plan.src, plan.src_rows, tensors, None),
                _pieces(plan, local, plan.dst, plan.dst_rows, outs, None),
                strict=True,
            )
        )
        self._sends = {
            peer: _segments(peer, _pieces(plan, plan.pieces(rank, peer), plan.src, plan.src_rows, tensors, most), most)
            for peer in plan.destinations(rank)
        }
        self._receives = {
            peer: _segments(peer, _pieces(plan, plan.pieces(peer, rank), plan.dst, plan.dst_rows, outs, most), most)
            for peer in plan.sources(rank)
        }
        self._rounds = max((len(s) for s in (*self._sends.values(), *self._receives.values())), default=0)
        self._under_way: list[tuple[dist.Work, Segment, bool]] = []
        self._round = 0
        self._start()

    def wait(self) -> list[torch.Tensor]:
        """Finish: unpack what arrives, in further rounds if need be."""
        while self._round < self._rounds or self._under_way:
            self._finish()
            self._start()
        return self.outs

    def _start(self) -> None:
        """Begin the next round, and do the local copies while the first one travels."""
        if self._round < self._rounds:
            receives = [s[self._round] for s in self._receives.values() if self._round < len(s)]
            sends = [s[self._round] for s in self._sends.values() if self._round < len(s)]
            self._round += 1
            if dist.get_backend(self._group) == "nccl":
                self._start_batch(receives, sends)
            else:
                self._start_each(receives, sends)
        for source, target in self._copies:
            self._write(target.view, source.view)
        self._copies = []

    def _start_each(self, receives: list[Segment], sends: list[Segment]) -> None:
        for segment in receives:
            buffer = self._receive_buffer(segment)
            work = self._attempt("receive from", segment, dist.irecv, buffer)
            self._under_way.append((work, segment, True))
        for segment in sends:
            buffer = self._send_buffer(segment)
            work = self._attempt("send to", segment, dist.isend, buffer)
            self._under_way.append((work, segment, False))

    def _start_batch(self, receives: list[Segment], sends: list[Segment]) -> None:
        operations = [P2POp(dist.irecv, self._receive_buffer(s), s.peer, self._group) for s in receives]
        operations += [P2POp(dist.isend, self._send_buffer(s), s.peer, self._group) for s in sends]
        works = dist.batch_isend_irecv(operations) if operations else []
        for work in works:
            work.wait()  # enqueued on the stream: the host does not wait
        for segment in receives:
            self._unpack(segment)

    def _attempt(
        self, what: str, segment: Segment, function: Callable[..., dist.Work | None], buffer: torch.Tensor
    ) -> dist.Work:
        try:
            work = function(buffer, segment.peer, group=self._group)
        except RuntimeError as error:
            raise self._lost(what, segment) from error
        assert work is not None, "only an outsider of the group gets no work, and it has no pieces"
        return work

    def _finish(self) -> None:
        """Wait for the round that is under way and unpack it as it arrives."""
        for work, segment, receiving in self._under_way:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost("receive from" if receiving else "send to", segment) from error
            if receiving:
                self._unpack(segment)
            segment.buffer = None
        self._under_way = []

    def _lost(self, what: str, segment: Segment) -> TransferError:
        size = segment.count * self._dtype.itemsize
        return TransferError(
            f"rank {self._rank} could not {what} rank {segment.peer} {size:,} bytes of a tensor on its way to another "
            f"layout: that rank has died, left or taken longer than the group's timeout"
        )

    # Buffers ----------------------------------------------------------------------------------------------------------

    def _send_buffer(self, segment: Segment) -> torch.Tensor:
        if len(segment.pieces) == 1 and segment.pieces[0].view.is_contiguous() and self._on_wire(segment.pieces[0]):
            return _as_bytes(segment.pieces[0].view)
        buffer = self._empty(segment.count)
        position = 0
        for piece in segment.pieces:
            buffer[position : position + piece.count].view(piece.view.shape).copy_(piece.view)
            position += piece.count
        segment.buffer = buffer
        return _as_bytes(buffer)

    def _receive_buffer(self, segment: Segment) -> torch.Tensor:
        if not self._sums and len(segment.pieces) == 1:
            (piece,) = segment.pieces
            if piece.view.is_contiguous() and piece.view.dtype == self._dtype and self._on_wire(piece):
                segment.in_place = True
                return _as_bytes(piece.view)
        segment.buffer = self._empty(segment.count)
        return _as_bytes(segment.buffer)

    def _unpack(self, segment: Segment) -> None:
        if segment.in_place or segment.buffer is None:
            return
        position = 0
        for piece in segment.pieces:
            arrived = segment.buffer[position : position + piece.count].view(piece.view.shape)
            self._write(piece.view, arrived.to(piece.view.device) if self._sums else arrived)
            position += piece.count

    def _on_wire(self, piece: Piece) -> bool:
        return piece.view.device.type == self._wire.type

    def _empty(self, count: int) -> torch.Tensor:
        pinned = self._wire.type == "cpu" and any(t.is_cuda for t in self.outs)
        return torch.empty(count, dtype=self._dtype, device=self._wire, pin_memory=pinned)


def move(
    plan: Plan,
    tensors: Sequence[torch.Tensor],
    process_group: ProcessGroup,
    *,
    dtype: torch.dtype,
    outs: list[torch.Tensor] | None = None,
    max_bytes: int | None = None,
) -> Moving:
    """Begin to move this rank's tensors of the source layout into tensors of the destination layout.

    Every rank that the plan names calls it. ``outs`` are the destination's tensors, made here when not given.
    """
    if outs is None:
        outs = empty_tensors(plan.dst, dtype, zero=plan.sums)
    with torch.no_grad():
        return Moving(plan, tensors, outs, process_group, dtype=dtype, max_bytes=max_bytes)


def empty_tensors(layout: Layout, dtype: torch.dtype, *, zero: bool = False) -> list[torch.Tensor]:
    """New local tensors for this rank's boxes of a layout."""
    make = torch.zeros if zero else torch.empty
    return [
        make(layout.boxes.sizes[row].tolist(), dtype=dtype, device=layout.place(row).device)
        for row in layout.rows_on(dist.get_rank())
    ]


def wire_device(plan: Plan, process_group: ProcessGroup) -> torch.device:
    """Where buffers must lie to be sent: decided by the layouts and the group, so the same at both ends."""
    backends = {device.type for device in process_group._device_types}
    kinds = {place.device.type for layout in (plan.src, plan.dst) for place in layout.places}
    accelerators = backends - {"cpu"}
    if dist.get_backend(process_group) == "gloo" or (kinds == {"cpu"} and "cpu" in backends) or not accelerators:
        return torch.device("cpu")  # gloo would abort if handed memory of another device
    kind = accelerators.pop()
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _pieces(
    plan: Plan,
    run: range,
    layout: Layout,
    rows: object,
    tensors: Sequence[torch.Tensor],
    most: int | None,
) -> list[Piece]:
    """Views of the local tensors for a run of pieces, each of at most so many elements."""
    if not run:
        return []
    here = {row: k for k, row in enumerate(layout.rows_on(dist.get_rank()))}
    chosen = slice(run.start, run.stop)
    row_list = rows[chosen].tolist()  # type: ignore[index] # an array of rows
    offsets = (plan.boxes.offsets[chosen] - layout.boxes.offsets[row_list]).tolist()
    sizes = plan.boxes.sizes[chosen].tolist()
    pieces = []
    for row, offset, size in zip(row_list, offsets, sizes, strict=True):
        tensor = tensors[here[row]].detach()
        boxes = [(offset, size)] if most is None else cut((offset, size), most)
        for begin, extent in boxes:
            view = tensor[tuple(slice(o, o + s) for o, s in zip(begin, extent, strict=True))] if extent else tensor
            pieces.append(Piece(view, view.numel()))
    return pieces


def _segments(peer: int, pieces: list[Piece], most: int | None) -> list[Segment]:
    """A message in segments of at most so many elements; without a limit it is one segment."""
    if most is None:
        return [Segment(peer, pieces)]
    segments: list[Segment] = []
    room = 0
    for piece in pieces:
        if piece.count > room or not segments:
            segments.append(Segment(peer, []))
            room = most
        segments[-1].pieces.append(piece)
        room -= piece.count
    return segments


def _segment_elements(plan: Plan, max_bytes: int, itemsize: int) -> int:
    """How large a segment may be so that no rank ever holds more than so many bytes of buffers."""
    at_once: dict[int, int] = {}
    for src, dst in plan.traffic:
        if src != dst:
            at_once[src] = at_once.get(src, 0) + 1
            at_once[dst] = at_once.get(dst, 0) + 1
    return max(max_bytes // (max(at_once.values(), default=1) * itemsize), 1)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, whatever its dtype."""
    return tensor.reshape(-1).view(torch.uint8)
