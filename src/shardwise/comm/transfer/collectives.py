"""Plans that are one of the backend's own collectives, which on an accelerator are the fastest way; sums are reduced
on the way."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.comm.group import rank_array
from shardwise.comm.transfer.all_to_all import Carrier
from shardwise.comm.transfer.operands import TransferOperands
from shardwise.comm.transfer.planned import PlannedTransfer
from shardwise.comm.transfer.recognise import RecognisedCollective, recognised
from shardwise.comm.transfer.views import as_bytes, copy
from shardwise.comm.transfer.wire import PendingExchange, Ready, begin_collective, is_fastest_by_collectives

# torch 2.13 gave these collectives new names and deprecated the old ones, the only ones before.
_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# What NCCL adds up.
REDUCED = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
REDUCED |= {torch.int8, torch.uint8, torch.int32, torch.int64}


def own_collective(planned: PlannedTransfer) -> type[OwnCollective] | None:
    """The carrier by the backend's own collective, if the plan is one, and the backend is fastest by it."""
    plan = planned.plan
    if not is_fastest_by_collectives(planned.wire) or (plan.sums and planned.dtype not in REDUCED):
        return None
    found = recognised(plan, rank_array(planned.group))
    return None if found is None else carrier_of(found)


def carrier_of(found: RecognisedCollective) -> type[OwnCollective] | None:
    """The carrier of a collective; None where the backend has only a slower one."""
    if found.root is not None:
        return Reduce if found.sums else Broadcast
    if not found.is_even and 0 in found.counts:
        return None
    return ReduceScatter if found.sums else AllGather


# How many bytes are sent, the collective, and what it is given.
Prepared = tuple[int, Callable[..., Any], *tuple[Any, ...]]


class OwnCollective(Carrier):
    """A transfer that is one of the backend's own collectives."""

    def __init__(self, operands: TransferOperands, planned: PlannedTransfer, ready: Ready) -> None:
        super().__init__(operands, planned)
        found = recognised(operands.plan, rank_array(operands.group))
        assert found is not None, "the plan is no collective"
        self._found, self._number = found, dist.get_rank(operands.group)
        size, *call = self._prepare([tensor.detach() for tensor in operands.tensors])
        ready()
        self._way = begin_collective(operands.group, size, self._wire, *call)

    @abstractmethod
    def _prepare(self, tensors: Sequence[torch.Tensor]) -> Prepared:
        """Put in order what is sent, and make room for what arrives."""

    def _views(self, whole: torch.Tensor, number: int) -> list[torch.Tensor]:
        """The boxes of a member in a whole tensor."""
        parts = self._found.parts
        return [whole[parts.index(row)] for row in self._found.rows[number]]

    def _boxes(self, flat: torch.Tensor, number: int) -> list[torch.Tensor]:
        """The boxes of a member, which lie one behind another."""
        sizes = [self._found.parts.extent(row) for row in self._found.rows[number]]
        counts = [torch.Size(size).numel() for size in sizes]
        found = flat[: sum(counts)].split_with_sizes(counts) if counts else ()
        return [one.view(size) for one, size in zip(found, sizes, strict=True)]

    def _flat(self, tensors: Sequence[torch.Tensor], size: int) -> torch.Tensor:
        """All elements of these tensors one behind another, filled up to a size; as they lie if they may."""
        if len(tensors) == 1 and self._fits(tensors[0]) and tensors[0].numel() == size:
            return tensors[0].view(-1)
        flat = self._empty(size)
        for one, old in zip(self._boxes(flat, self._number), tensors, strict=True):
            copy(one, old)
        return flat

    def _reduced(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor as the backend adds it up."""
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class AllGather(OwnCollective):
    """Each rank's part to all ranks."""

    def _prepare(self, tensors: Sequence[torch.Tensor]) -> Prepared:
        found, whole = self._found, self.outs[0]
        self._counts, even = found.split
        given = self._flat(tensors, self._counts[self._number])
        self._arrived = (
            None
            if found.is_in_order and self._fits(whole) and sum(self._counts) == whole.numel()
            else self._empty(sum(self._counts))
        )
        taken = whole.view(-1) if self._arrived is None else self._arrived
        if even:
            return given.nbytes, _gather, as_bytes(taken), as_bytes(given)
        each = [as_bytes(one) for one in taken.split_with_sizes(self._counts)]
        return given.nbytes, dist.all_gather, each, as_bytes(given)

    def _deliver(self) -> None:
        if self._arrived is None:
            return
        whole, grid = self.outs[0], self._found.grid
        if grid is not None and whole.is_contiguous():
            shape, order = grid
            target = whole.view(shape).permute(order)
            copy(target, self._arrived.view(target.shape))
        else:
            for number, part in enumerate(self._arrived.split_with_sizes(self._counts)):
                for view, box in zip(self._views(whole, number), self._boxes(part, number), strict=True):
                    copy(view, box)
        self._arrived = None


class ReduceScatter(OwnCollective):
    """Each rank's part of the sum of all ranks' tensors."""

    def _prepare(self, tensors: Sequence[torch.Tensor]) -> Prepared:
        found = self._found
        self._counts, even = found.split
        given, mine = self._in_order(tensors[0]), self._counts[self._number]
        straight = len(self.outs) == 1 and self._fits(self.outs[0]) and self.outs[0].numel() == mine
        self._arrived = None if straight else self._empty(mine)
        taken = self.outs[0].view(-1) if self._arrived is None else self._arrived
        if even:
            return given.nbytes, _reduce_scatter, self._reduced(taken), self._reduced(given)
        each = [self._reduced(one) for one in given.split_with_sizes(self._counts)]
        return given.nbytes, dist.reduce_scatter, self._reduced(taken), each

    def _in_order(self, whole: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks one behind another."""
        found = self._found
        if found.is_in_order and self._fits(whole) and sum(self._counts) == whole.numel():
            return whole.view(-1)
        flat = self._empty(sum(self._counts))
        if found.grid is not None:
            shape, order = found.grid
            parts = whole.reshape(shape).permute(order)
            copy(flat.view(parts.shape), parts)
            return flat
        for number, part in enumerate(flat.split_with_sizes(self._counts)):
            for view, box in zip(self._views(whole, number), self._boxes(part, number), strict=True):
                copy(box, view)
        return flat

    def _deliver(self) -> None:
        if self._arrived is not None:
            for out, box in zip(self.outs, self._boxes(self._arrived, self._number), strict=True):
                copy(out, box)
            self._arrived = None


class Broadcast(OwnCollective):
    """All of one rank's tensor to all others."""

    def _prepare(self, tensors: Sequence[torch.Tensor]) -> Prepared:
        whole, root = self.outs[0], self._found.root
        self._arrived = None if self._fits(whole) else self._empty(whole.numel()).view(whole.shape)
        taken = whole if self._arrived is None else self._arrived
        if root == self._rank:
            for view, tensor in zip(self._views(taken, self._number), tensors, strict=True):
                copy(view, tensor)
        return taken.nbytes, dist.broadcast, as_bytes(taken), root

    def _deliver(self) -> None:
        if self._arrived is not None:
            copy(self.outs[0], self._arrived)
            self._arrived = None


class Reduce(OwnCollective):
    """The sum of all ranks' tensors to one of them."""

    def _prepare(self, tensors: Sequence[torch.Tensor]) -> Prepared:
        whole, root = tensors[0], self._found.root
        self._total = self._empty(whole.numel()).view(whole.shape)  # the backend works in it, and not only on the root
        copy(self._total, whole)
        return whole.nbytes, dist.reduce, self._reduced(self._total), root

    def _deliver(self) -> None:
        for out, view in zip(self.outs, self._views(self._total, self._number), strict=True):
            copy(out, view)


def begin_all_reduce(total: torch.Tensor, group: ProcessGroup) -> PendingExchange:
    """Begin to add this tensor up over all ranks, in its place."""
    data = torch.view_as_real(total) if total.is_complex() else total
    return begin_collective(group, total.nbytes, total.device, dist.all_reduce, data)
