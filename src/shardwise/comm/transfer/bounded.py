"""A redistribution under a limit of extra memory: the load of one tensor, in rounds.

On the CPU rounds go on while somebody waits. A transfer that nobody can wait for any more, for its handle was dropped,
ends by itself in a thread, so that it keeps no memory and ranks that do wait get their data.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shardwise.comm.group import GroupState, TaggedMessages, abandon, group_state, is_tagged
from shardwise.comm.peers import given_up
from shardwise.comm.transfer.copies import as_here
from shardwise.comm.transfer.operands import TransferOperands
from shardwise.comm.transfer.pieces import MOST_ASKED, MOST_SPOTS
from shardwise.comm.transfer.plan import TransferPlan
from shardwise.comm.transfer.rounds import Rounds
from shardwise.comm.transfer.segments import Limits, Load, Piece
from shardwise.comm.transfer.views import copy, view_of
from shardwise.comm.transfer.wire import (
    GroupWire,
    PendingWork,
    Ready,
    TaggedExchange,
    described,
    failed_before,
    failing_together,
)
from shardwise.layout import Layout


class Bounded:
    """What a caller holds of a transfer in rounds. Once nobody holds it any more, the transfer ends by itself."""

    def __init__(self, transfer: BoundedTransfer) -> None:
        self._transfer = transfer

    def wait(self) -> list[torch.Tensor]:
        """Finish, and give the local tensors of the destination."""
        return self._transfer.wait()

    def __del__(self) -> None:
        self._transfer.let_go()


# In the order in which they were begun, which is the same on every rank; ranks may be threads of one process.
_unfinished: list[BoundedTransfer] = []


def _forget_unfinished(state: GroupState) -> None:
    """The group of these transfers is destroyed."""
    for transfer in tuple(_unfinished):
        if group_state(transfer._group) is state and transfer._take():
            transfer._end("its process group was destroyed")


class BoundedTransfer:
    """A transfer in rounds, under a limit of extra memory."""

    def __init__(self, operands: TransferOperands, ready: Ready, max_bytes: int) -> None:
        plan, tensors, outs, group = operands.plan, operands.tensors, operands.outs, operands.group
        self.outs = outs
        self._group, self._rank = group, dist.get_rank()
        wire = GroupWire(group, plan.device_types)
        on_cpu = wire.device.type == "cpu"
        self._rounds = Rounds(
            _load(plan, operands.dtype, self._rank, max_bytes, wire.device),
            wire,
            _views(plan.src, self._rank, tensors),
            _views(plan.dst, self._rank, outs),
            pinned=on_cpu and any(tensor.is_cuda for tensor in (*tensors, *outs)),
            fixed=lambda _: not plan.sums,
            reused=False,
            write=_add if plan.sums else copy,
        )
        wire.call = ready()
        self._epoch, self._failure = group_state(group).history.epoch, ""
        self._is_over = threading.Event()
        self._is_tagged = on_cpu and is_tagged(group)
        self._context = as_here()  # of the stream in which copies to the host must be
        if on_cpu:
            if not self._is_tagged:  # messages without tags are told apart by their order
                self._finish_earlier()
            _unfinished.append(self)  # kept until done: its buffers are on the wire
            group_state(group).at_end.add(_forget_unfinished)
        try:
            self._rounds.start()
        except BaseException:
            self._take()
            raise
        if not on_cpu:
            self._rounds.finish()  # all is in the stream: the host does not wait
            self._end()

    def wait(self) -> list[torch.Tensor]:
        """Finish: unpack what arrives, in further rounds if need be. A transfer that has failed raises every time.

        What was begun earlier is finished first, whoever waits for it, so that all ranks go through their rounds in the
        same order. What another thread finishes is waited for.
        """
        with torch.no_grad():
            while self in _unfinished:
                self._finish_first()
        self._is_over.wait()
        if self._failure:
            raise failed_before(self._failure)
        return self.outs

    def _end(self, failure: str = "") -> None:
        """It is over, for whoever waits in any thread."""
        self._failure = failure
        self._is_over.set()

    def _finish_earlier(self) -> None:
        """What was begun in this group and is not finished, on all ranks alike."""
        while any(other._rank == self._rank and other._group is self._group for other in _unfinished):
            self._finish_first()

    def _finish_first(self) -> None:
        """Of all that this rank has begun."""
        first = next((other for other in tuple(_unfinished) if other._rank == self._rank), None)
        if first is None or not first._take():
            return
        if group_state(first._group).history.epoch != first._epoch:  # the other ranks may have given it up
            first._end(str(given_up()))
            return
        try:
            with failing_together(first._group):
                first._rounds.finish()
        except BaseException as error:
            first._end(described(error))
            raise
        first._end()

    def _take(self) -> bool:
        """Whether the caller is to finish the transfer: nobody else does, in any thread."""
        try:
            _unfinished.remove(self)
        except ValueError:
            return False
        return True

    def let_go(self) -> None:
        """Nobody waits for it: have a thread finish it. The garbage collector calls this, at any moment."""
        if self._is_tagged and self._take():
            abandon(_posts(self._rounds.under_way), self._next_alone)

    def _next_alone(self) -> list[TaggedMessages]:
        """Begin the next rounds, in a thread; what has arrived is for nobody."""
        self._rounds.drop()
        if group_state(self._group).history.epoch != self._epoch:  # the other ranks may have given it up
            return []
        with torch.no_grad(), failing_together(self._group), self._context():
            self._rounds.go_on()
        return _posts(self._rounds.under_way)


def _posts(under_way: Sequence[PendingWork]) -> list[TaggedMessages]:
    return [pending.post for pending in under_way if isinstance(pending, TaggedExchange)]


def _load(plan: TransferPlan, dtype: torch.dtype, rank: int, max_bytes: int, wire: torch.device) -> Load:
    """What a rank sends and receives; kept as long as the pieces, if they are few."""
    pieces, world = plan.sends(rank), dist.get_world_size()
    key = dtype, world, max_bytes, wire.type
    found = pieces.loads.get(key)
    if found is None:
        limits = Limits.of(max_bytes, plan.most_peers, world, wire, itemsize=dtype.itemsize)
        found = Load.of([plan], [dtype], rank, world, limits)
        if len(pieces.loads) < MOST_ASKED and len(found) <= MOST_SPOTS:
            pieces.loads[key] = found
    return found


def _views(layout: Layout, rank: int, tensors: Sequence[torch.Tensor]) -> Callable[[Piece], torch.Tensor]:
    """A function that gives the place of a piece in this rank's local tensors of a layout."""
    local = {row: tensor.detach() for row, tensor in zip(layout.rows_on(rank), tensors, strict=True)}
    return lambda piece: view_of(local[piece.row], piece.offsets, piece.sizes)


def _add(target: torch.Tensor, source: torch.Tensor) -> None:
    target.add_(source.to(target.device))
