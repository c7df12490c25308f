"""`FlatMemory`: parameters of a unit one behind another in one buffer, of which each rank keeps one stretch.

To gather is one transfer from the stretches into the whole buffer, of which the parameters are views. To reduce is one
transfer back, of the sum of all ranks' gradients. Both begin at once and are awaited later, so that they go on beside
the computation; on an accelerator the host never waits.

The whole buffer keeps its storage object for good, without memory between uses: what autograd has saved of the
parameters is there again when the buffer is gathered for the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.autograd.anchors import tie
from shardwise.autograd.transfers import Way, moved_locals
from shardwise.comm.group import CallFingerprint, group_state, rank_array
from shardwise.comm.transfer import Moving, make_plan, move
from shardwise.comm.transfer.all_reduce import AllReduce, holding_of
from shardwise.comm.transfer.local_copies import Done
from shardwise.comm.transfer.views import address
from shardwise.errors import PlanError, UnsupportedOpError
from shardwise.layout import Layout, Places
from shardwise.layout.geometry import Boxes
from shardwise.layout.specs.chunking import sized_axis
from shardwise.nn.fully_sharded.cuts import Box, FlatEntry, boxes_of
from shardwise.nn.fully_sharded.gathered_parameters import gathered
from shardwise.nn.fully_sharded.rank_groups import RankGroups
from shardwise.nn.sharding_plan.tree import ModuleSlot
from shardwise.tensor import ShardedTensor
from shardwise.tensor.frame import Frame


@dataclass(frozen=True)
class FlatParameter:
    """A parameter in flat memory: where the model uses it, and which shards this rank has of it."""

    name: str
    entries: tuple[FlatEntry, ...]  # in the flat memory of this rank's row
    slots: tuple[ModuleSlot, ...]
    sharded: ShardedTensor  # the parameter of the model while the unit does not compute
    stretches: tuple[tuple[int, int], ...]  # where each of this rank's boxes lies in the rank's stretch
    gathered: Frame | None  # of the gathered parameter, if another plan has cut it; None: every rank has it whole


Gradients = Sequence[torch.Tensor | None]
Reduce = Callable[["FlatMemory", Gradients], None]  # called with the gradients of all parameters of a memory


@dataclass(frozen=True)
class Precision:
    """The dtypes in which parameters are gathered and gradients are summed; None: that of the parameters."""

    parameters: torch.dtype | None = None
    gradients: torch.dtype | None = None


class Stretches:
    """The boxes of a parameter on the ranks that share it out, and where each begins in the stretch of its rank."""

    def __init__(self) -> None:
        self._offsets: list[tuple[int, ...]] = []
        self._sizes: list[tuple[int, ...]] = []
        self._ranks: list[int] = []
        self.starts: list[int] = []

    def add(self, box: Box, begin: int, edges: Sequence[int], ranks: Sequence[int]) -> None:
        """A box of the parameter that begins at a place of the flat memory of these ranks, cut at these edges."""
        first_index, shape = box
        for rank, (low, high) in zip(ranks, pairwise(edges), strict=True):
            first, last = max(low - begin, 0), min(high - begin, torch.Size(shape).numel())
            at = begin + first - low
            for offsets, sizes in boxes_of(shape, first, last):
                self._offsets.append(tuple(a + b for a, b in zip(first_index, offsets, strict=True)))
                self._sizes.append(sizes)
                self._ranks.append(rank)
                self.starts.append(at)
                at += torch.Size(sizes).numel()

    def layout(self, size: Sequence[int], device_type: str) -> Layout:
        """The layout of the parameter."""
        boxes = Boxes.parse(self._offsets, self._sizes, len(size))
        places = Places.on_ranks(np.array(self._ranks, dtype=np.int64), device_type)
        return Layout.of(size, boxes, places)


class FlatMemory:
    """The memory of some parameters of one dtype."""

    def __init__(
        self,
        what: str,
        entries: Sequence[FlatEntry],
        edges: Sequence[int],
        groups: RankGroups,
        dtype: torch.dtype,
        device: torch.device,
        precision: Precision,
        offload: bool,
    ) -> None:
        """Memory for these entries, cut at these edges; the stretch of this rank on this device, or offloaded.

        The parameters are added when their values are in it.
        """
        self.parameters: list[FlatParameter] = []
        self.what = what
        self._groups = groups
        places, total = Places.on_ranks(rank_array(groups.row), device.type), edges[-1]
        sizes = [high - low for low, high in pairwise(edges)]
        source = Layout.by_rule([total], [sized_axis(0, sizes)], places)
        self._plan = make_plan(source, Layout.whole([total], places))
        self.dtype, self._device = dtype, device
        self.gathered_dtype, self._sum_dtype = precision.parameters or dtype, precision.gradients
        home = torch.device("cpu") if offload else device
        self.shard = torch.empty(sizes[groups.part], dtype=dtype, device=home, pin_memory=home.type != device.type)
        self._entries = entries
        self._sizes = [entry.elements for entry in entries]
        self._sizes.append(total - sum(self._sizes))  # the rest is padding
        self._is_alone = groups.parts == 1 and self.gathered_dtype == dtype and home == device
        self._whole = self.shard if self._is_alone else self._new_buffer(total)
        self._gathering: Moving | None = None
        self._epoch = 0  # in which gathering began
        self._is_gathered = False
        self._summed: set[int] = set()  # the numbers of the parameters whose gradients are being summed
        self.grad: torch.Tensor | None = None  # of the shard: the gradients of all local shards are views of it
        self._unreduced: torch.Tensor | None = None  # gradients of this rank's samples that are not summed yet
        self._used: set[int] = set()  # the numbers of the parameters that have such gradients
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    def _new_buffer(self, total: int) -> torch.Tensor:
        """A buffer without memory."""
        buffer = torch.empty(total, dtype=self.gathered_dtype, device=self._device)
        buffer.untyped_storage().resize_(0)
        return buffer

    # Gathering -------------------------------------------------------------------------------------------------------

    @property
    def bytes_gathered(self) -> int:
        """The size of the whole buffer."""
        return self._whole.numel() * self.gathered_dtype.itemsize

    def begin_gathering(self) -> None:
        """Begin to gather, unless that is done or under way. Every rank of the group calls it."""
        if self._is_gathered or self._gathering is not None:
            return
        if self._is_alone:
            self._is_gathered = True
            return
        self._whole.untyped_storage().resize_(self.bytes_gathered)
        self._epoch = group_state(self._groups.row).history.epoch
        given = self.shard.to(self._device, non_blocking=True).to(self.gathered_dtype)
        try:
            self._gathering = move(
                self._plan,
                [given],
                self._groups.row,
                dtype=self.gathered_dtype,
                outs=[self._whole.data],  # with a version counter of its own: what autograd has saved is the same again
                lent=True,
                verb=f"gather {self.what}",
            )
        except BaseException:
            self._drop_buffer()
            raise

    def gather(self) -> None:
        """Have the parameters in the whole buffer."""
        self.begin_gathering()
        if self._gathering is not None:
            gathering, self._gathering = self._gathering, None
            try:
                gathering.wait()
            except BaseException:
                self._drop_buffer()
                raise
            self._is_gathered = True

    def _drop_buffer(self) -> None:
        """Leave the memory to messages that may still come."""
        self._whole = self._new_buffer(self._whole.numel())
        self._gathering, self._is_gathered = None, False

    def free(self) -> None:
        """Give the memory of the whole buffer back, unless a transfer into it is under way."""
        if self._is_gathered and not self._is_alone:
            self._whole.untyped_storage().resize_(0)
        self._is_gathered = False

    def discard(self) -> None:
        """End what an interrupted step has left, or one that gathered more than it used."""
        if self._gathering is not None and self._epoch == group_state(self._groups.row).history.epoch:
            self.gather()
        elif self._gathering is not None:  # the ranks have failed since: nobody may send
            self._drop_buffer()
        self.free()

    def forget_unreduced(self) -> None:
        """Drop the gradients of earlier backwards that were not summed."""
        self._unreduced, self._used = None, set()

    def views(self, reduce: Reduce) -> list[torch.Tensor]:
        """Each entry in the gathered buffer; if recorded, the gradients of all of them are reduced together."""
        wanted = [one.sharded.requires_grad for one in self.parameters for _ in one.entries]
        if any(wanted) and torch.is_grad_enabled():
            return list(gathered(self, reduce, wanted, self._anchor))
        return self.split()

    def views_in_graph(self, parameters: Sequence[Any]) -> list[torch.Tensor]:
        """Each entry of these parameters while a compiler traces, gathered by an op of its graph.

        The gradients of all of them are summed by another one. What is gathered stays until the backward.
        """
        if self._groups.column is not None or self.shard.device.type != self._device.type:
            raise UnsupportedOpError(
                f"{self.what} is offloaded, or sharded over a part of the ranks only: that cannot be a part of one "
                "graph. Compile without fullgraph, or each block by itself: block.compile()"
            )
        if self._sum_dtype not in (None, self.gathered_dtype):
            raise UnsupportedOpError(
                f"gradients of {self.what} are summed in another dtype than parameters are gathered in: that cannot be "
                "a part of one graph. Give both the same precision, or compile without fullgraph"
            )
        pieces: list[tuple[int, torch.Tensor]] = []
        for one, parameter in zip(self.parameters, parameters, strict=True):
            found = zip(one.stretches, parameter._local_tensors(), strict=True)
            pieces += [(low, tensor.reshape(-1)) for (low, _), tensor in found]
        pieces.sort(key=lambda pair: pair[0])
        end, parts = 0, []
        for low, tensor in pieces:
            parts += [tensor.new_zeros(low - end)] * (low > end) + [tensor]
            end = low + tensor.numel()
        parts.append(torch.zeros(self.shard.numel() - end, dtype=self.dtype, device=self._device))
        shard = torch.cat(parts).to(self.gathered_dtype)
        if self._is_alone:
            whole = shard
        else:
            records = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)
            anchors = [anchor for parameter in parameters if (anchor := parameter._anchored()) is not None]
            anchor = tie(anchors) if anchors and records else None
            way = Way(self._groups.row, verb=f"gather {self.what}")
            (whole,), _ = moved_locals([shard], anchor, self._plan, way, self.gathered_dtype, record=records)
        found_parts = whole.split_with_sizes(self._sizes)
        return [part.view(entry.shape) for part, entry in zip(found_parts, self._entries, strict=False)]

    @property
    def wants_grad(self) -> bool:
        """Whether any parameter does."""
        return any(one.sharded.requires_grad for one in self.parameters)

    def split(self) -> list[torch.Tensor]:
        """The entries, as tensors over the memory of the gathered buffer, with version counters of their own."""
        parts = self._whole.data.split_with_sizes(self._sizes)
        return [part.view(entry.shape).data for part, entry in zip(parts, self._entries, strict=False)]

    def joined(self, grads: Gradients) -> torch.Tensor:
        """The gradients of all entries one behind another; zeros where there are none."""
        sizes = zip(grads, self._sizes, strict=False)
        parts = [self._zeros(size) if grad is None else grad.reshape(-1) for grad, size in sizes]
        return torch.cat([*parts, self._zeros(self._sizes[-1])])

    def _zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=self.gathered_dtype, device=self._device)

    # Gradients -------------------------------------------------------------------------------------------------------

    @property
    def is_unreduced(self) -> bool:
        """Whether there are gradients that are not summed yet."""
        return self._unreduced is not None

    def add_unreduced(self, grads: Gradients) -> None:
        """Keep the gradients of this rank's samples until they are summed, with those of earlier backwards."""
        joined = self.joined(grads)
        self._unreduced = joined if self._unreduced is None else self._unreduced + joined
        owners = [number for number, one in enumerate(self.parameters) for _ in one.entries]
        self._used |= {number for number, grad in zip(owners, grads, strict=True) if grad is not None}

    def begin_reducing(self) -> Moving:
        """Begin to sum the gradients of all ranks, each rank's stretch for that rank. Every rank calls it."""
        grad, self._unreduced = self._unreduced, None
        assert grad is not None, "there are gradients"
        self._summed, self._used = self._used, set()
        dtype = self._sum_dtype or grad.dtype
        grad = grad.to(dtype)
        summing: Moving = Done([grad])
        if not self._is_alone:
            verb = f"sum the gradients of {self.what}"
            summing = move(self._plan.reverse(), [grad], self._groups.row, dtype=dtype, verb=verb)
        return summing if self._groups.column is None else _SumOfRows(summing, self._groups.column, self.what)

    def accumulate(self, total: torch.Tensor) -> None:
        """Give the parameters their gradients, or add to those that they have."""
        total = total.to(self.shard.device, self.dtype)
        used = [one for number, one in enumerate(self.parameters) if number in self._summed]
        wanted = [one for one in used if one.sharded.requires_grad]
        hooked = any(_has_hooks(one.sharded) for one in wanted)
        if self.grad is not None and not hooked and all(self.has_flat_grad(one) for one in self.parameters):
            self.grad += total
            return
        if all(one.sharded.grad is None for one in self.parameters):
            self.grad = total
        for one in wanted:
            _accumulate(one, total)

    def has_flat_grad(self, one: FlatParameter) -> bool:
        """Whether the gradients of a parameter are views of this rank's gradient, as they were made."""
        if self.grad is None:
            return False
        tensors, first, size = one.sharded._local_tensors(), address(self.grad), self.grad.element_size()
        if not tensors:
            return one.sharded.grad is not None
        return all(
            tensor.grad is not None and address(tensor.grad) == first + low * size
            for tensor, (low, _) in zip(tensors, one.stretches, strict=True)
        )

    # Values ----------------------------------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Have the local shards of all parameters in this rank's stretch again, should others have replaced them."""
        first, size = address(self.shard), self.shard.element_size()
        if self.grad is not None and not any(self.has_flat_grad(one) for one in self.parameters):
            self.grad = None  # which nobody reads any more
        for one in self.parameters:
            tensors = one.sharded._local_tensors()
            if one.sharded.dtype != self.dtype:
                raise PlanError(
                    f"{one.name!r} is {one.sharded.dtype} now and was {self.dtype} when the model was fully "
                    "sharded: convert the model before, or give a precision"
                )
            if any(
                address(tensor) != first + low * size for tensor, (low, _) in zip(tensors, one.stretches, strict=True)
            ):
                self._adopt(one)

    @torch.no_grad()
    def _adopt(self, one: FlatParameter) -> None:
        for tensor, (low, high) in zip(one.sharded._local_tensors(), one.stretches, strict=True):
            place = self.shard[low:high].view(tensor.shape)
            place.copy_(tensor)
            tensor.data = place


class _SumOfRows:
    """The sum of a row, under way; then the sum over the rows."""

    def __init__(self, of_row: Moving, column: ProcessGroup, what: str) -> None:
        self._of_row, self._column, self._what = of_row, column, what

    def wait(self) -> list[torch.Tensor]:
        """The sum of all ranks, the same bits on every rank of the column."""
        (total,) = self._of_row.wait()
        everywhere = Layout.whole(total.shape, Places.on_ranks(rank_array(self._column), total.device.type))
        holding = holding_of(everywhere, dist.get_rank(), self._column.size())
        said = CallFingerprint({"verb": f"sum the gradients of {self._what} over replicas", "elements": total.numel()})
        return list(AllReduce(holding, [total], self._column, dtype=total.dtype, said=said).wait())


def _has_hooks(parameter: ShardedTensor) -> bool:
    locals_ = parameter._local_tensors()
    return parameter._hooks is not None or any(one._post_accumulate_grad_hooks for one in locals_)


def _accumulate(one: FlatParameter, total: torch.Tensor) -> None:
    """The gradient of one parameter, which is a part of that of the rank's stretch; with hooks as autograd has them."""
    parameter = one.sharded
    tensors = parameter._local_tensors()
    parts = [total[low:high].view(each.shape) for each, (low, high) in zip(tensors, one.stretches, strict=True)]
    if _has_hooks(parameter):
        with torch.enable_grad():
            anchor = parameter._anchored()
        leaves = tensors if anchor is None else [anchor]
        torch.autograd.backward(leaves, parts or [torch.zeros_like(leaf) for leaf in leaves])
        return
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.grad = part if tensor.grad is None else tensor.grad + part
    if not tensors and parameter.grad is None:
        parameter._shardless_grad = parameter._like([])
