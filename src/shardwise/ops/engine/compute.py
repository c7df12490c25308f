"""Computing a call under a rule: move the operands as the schedule says, run the op on each cell, wrap the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise import settings
from shardwise.autograd.anchors import new_anchor, note_write, tie
from shardwise.comm.agreement import in_op, in_step_telling, room
from shardwise.comm.group import CallFingerprint, Fields, cached_per_group, is_member, rank_array, talks
from shardwise.comm.peers import notify_of_failure
from shardwise.comm.tracing import record
from shardwise.comm.transfer import make_plan
from shardwise.comm.transfer.in_graph import is_traced
from shardwise.errors import ProcessGroupError, UnsupportedOpError
from shardwise.layout import Layout, Places
from shardwise.ops.engine.call import Call, may_alias_operand, outer_function
from shardwise.ops.engine.cells import deduplicated
from shardwise.ops.engine.plain_operand import has_stand_in
from shardwise.ops.engine.recorder import active, redistribute_operand, run_step, use_in_place
from shardwise.ops.engine.result_metadata import SizeAndDtype, expected_results, in_schema_form, partial_dtypes
from shardwise.ops.engine.rule import Rule
from shardwise.ops.engine.schedule import Operand, Schedule, make_reduction_plan, make_schedule, tensor_size
from shardwise.ops.engine.steps import MoveLocals, OpSummary, RedistributeOperand, SharePlain, SplitPlain, TieAnchors
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import unsupported
from shardwise.tensor.frame import Frame, Parts
from shardwise.tensor.redistribution_cache import cached_layout, is_activation
from shardwise.torch_private import pytree

Tensors = list[torch.Tensor]


def compute(
    call: Call, rule: Rule | None, *, written: int | None = None, moves: bool = True, partial: Call | None = None
) -> Any:
    """The op under this rule, or NotImplemented if there is no rule, or no schedule within the gather budget.

    Where operands move, every rank of the group takes part; without ``moves``, that is NotImplemented too. ``written``
    is the number of the operand that the op writes into. Where results are sums of what several cells contribute, the
    call ``partial``, if given, is computed instead, on the same operands.
    """
    if rule is None:
        return NotImplemented
    expected = expected_results(call)
    _require_sizes_of_torch(rule, expected, call)
    group, places = common_group(call)
    caches = not may_alias_operand(call.op)
    operands = tuple(_operand(operand, caches=caches) for operand in call.operands)
    current = settings.current()
    whole_sums = 0 if torch.is_grad_enabled() else current.whole_sums
    schedule = make_schedule(rule, operands, places, current.gather_budget, written, whole_sums)
    if schedule is None or (schedule.moved and not moves):
        return NotImplemented
    if partial is not None and schedule.partial:
        call, expected = partial, expected_results(partial)
    return _Computation(call, rule, schedule, group, places, expected, written).run()


def _operand(operand: torch.Tensor, *, caches: bool) -> Operand:
    """What every rank knows of an operand."""
    if not isinstance(operand, ShardedTensorBase):
        return Operand(None, operand.dtype.itemsize)
    has_gradient = torch.is_grad_enabled() and operand.requires_grad
    cached = cached_layout(operand) if caches else None
    return Operand(operand._layout, operand.dtype.itemsize, has_gradient, is_activation(operand), cached)


def _require_sizes_of_torch(rule: Rule, expected: list[SizeAndDtype], call: Call) -> None:
    """A wrong rule raises, and never gives a wrong result."""
    sizes = [tuple(tensor_size(rule, dims)) for dims in rule.results]
    of_torch = [tuple(size) for size, _ in expected]
    if sizes != of_torch:
        raise UnsupportedOpError(f"the rule for {call.name} gives results of sizes {sizes}, torch gives {of_torch}")


class _Computation:
    """One call under one schedule."""

    def __init__(
        self,
        call: Call,
        rule: Rule,
        schedule: Schedule,
        group: ProcessGroup | None,
        places: Places,
        expected: list[SizeAndDtype],
        written: int | None,
    ) -> None:
        self.call, self.rule, self.schedule = call, rule, schedule  # whose rule is equal, but may be another object
        self.group, self.places, self.expected, self.written = group, places, expected, written
        # Whether partial results are so small that all ranks get them while they agree.
        self.shared_at_once = (
            schedule.partial and not schedule.moved and _can_share_at_once(call, schedule, places, group)
        )
        self.rows = schedule.cells.rows_on(dist.get_rank() if dist.is_initialized() else -1)  # the local cells
        self.records = torch.is_grad_enabled() and any(operand.requires_grad for operand in call.operands)
        self.anchors: Tensors = []

    def run(self) -> Any:
        """The results, as the op gives them, sharded."""
        by_operand = [self._place_operand(number) for number in range(len(self.call.operands))]
        by_cell = [[tensors[k] for tensors in by_operand] for k in range(len(self.rows))]
        if self.schedule.partial:
            return self._reduce(by_cell)
        results = [self._run_on_cell(row, tensors) for row, tensors in zip(self.rows, by_cell, strict=True)]
        return self._wrap(self.schedule.results, results)

    def _place_operand(self, number: int) -> Tensors:
        """One tensor of this operand for each local cell."""
        operand, target = self.call.operands[number], self.schedule.operands[number]
        if not isinstance(operand, ShardedTensorBase):
            return self._split_plain(operand, number)
        used: Sequence[int] = range(len(self.rows))  # the number of the local tensor that each cell takes
        caches = not may_alias_operand(self.call.op)
        if not self.schedule.in_place[number]:
            target, row_of = deduplicated(target) if caches else (target, None)
            if row_of is not None:
                local = target.rows_on(dist.get_rank())
                used = [local.index(int(row_of[row])) for row in self.rows]
        if target != operand._layout:
            assert self.group is not None
            record = torch.is_grad_enabled() and operand.requires_grad
            plan = make_plan(operand._layout, target)
            step = RedistributeOperand(plan, self.group, op_summary(self.call), record, caches)
            tensors = redistribute_operand(step, operand)
        elif number != self.written and operand._layout.has_replicas:
            tensors = use_in_place(operand)
        else:  # the tensors themselves, no views
            anchor, tensors = operand._anchored(), operand._local_tensors()
            tensors = tensors if anchor is None else [*tensors, anchor]
        count = len(target.rows_on(dist.get_rank() if dist.is_initialized() else -1))
        self.anchors += tensors[count:]
        return [tensors[k] for k in used]

    def _split_plain(self, operand: torch.Tensor, number: int) -> Tensors:
        """The part of a plain operand, which is the same on every rank, for each local cell."""
        layout = self.schedule.operands[number]
        if torch.is_grad_enabled() and operand.requires_grad:
            if self.group is not None and self._can_split(operand, layout):
                *parts, anchor = run_step(SplitPlain(layout, self.group), operand)
                self.anchors.append(anchor)
                return parts
            (operand,) = run_step(SharePlain(self.group), operand)
        if operand.requires_grad and not self.rows:
            self.anchors.append(tie([operand]))
        if may_alias_operand(self.call.op):  # never the operand itself
            return [operand[layout.index(row)] if operand.ndim else operand for row in self.rows]
        size = list(operand.shape)
        return [operand if layout.extent(row) == size else operand[layout.index(row)] for row in self.rows]

    def _can_split(self, operand: torch.Tensor, layout: Layout) -> bool:
        """Whether the gradient of a plain operand is put together from parts. That of a leaf is summed with others."""
        if self.group is None or operand.is_leaf or not layout.is_partition or not is_member(self.group):
            return False
        return not (is_traced() and has_stand_in(operand, self.group))

    def _run_on_cell(self, row: int, tensors: Tensors) -> Any:
        changes = {}
        if self.rule.adapt is not None:
            changes = self.rule.adapt(self.call, [layout.extent(row) for layout in self.schedule.results])
        if self.rule.contiguous:
            tensors = [tensor.contiguous() for tensor in tensors]
        return self.call.run(tensors, **changes)

    def _reduce(self, by_cell: list[Tensors]) -> Any:
        """The results of a reduction over a label that is cut: partial results of each cell, moved and combined."""
        reduction, group = self.rule.reduction, self.group
        assert reduction is not None
        assert group is not None
        plan = make_reduction_plan(self.schedule, self.places)
        dtypes = partial_dtypes(self.call, reduction)
        partials: list[tuple[torch.Tensor, ...]] = []
        failure: Exception | None = None
        for row, tensors in zip(self.rows, by_cell, strict=True):
            if not plan.contributes(row):
                self.anchors.append(tie(tensors))
                continue
            try:
                made = reduction.partial(self.call, tensors) if reduction.partial else self.call.run(tensors)
            except Exception as error:
                failure = error
                break
            partials.append(made if isinstance(made, tuple) else (made,))
        if failure is not None:
            self._report_failure(group, failure)
        moved: list[Tensors] = []
        anchor = run_step(TieAnchors(), *self.anchors)[0] if self.anchors else None
        count = len(plan.transfer.dst.rows_on(dist.get_rank()))
        for k, dtype in enumerate(dtypes):
            parts = [partial[k].unsqueeze(0) if plan.stacked else partial[k] for partial in partials]
            record, shared_at_once = self.records and _differentiable(dtype), self.shared_at_once and k == 0
            fill = reduction.fill_values(dtype)[k]
            step = MoveLocals(plan.transfer, group, op_summary(self.call), record, dtype, fill, shared_at_once)
            arrived = run_step(step, anchor, *(part.contiguous() for part in parts))
            moved.append(arrived[:count])
            self.anchors += arrived[count:]
        results: list[Any] = moved[0]
        if plan.stacked:
            results = [reduction.combine(self.call, list(pieces)) for pieces in zip(*moved, strict=True)]
        return self._wrap((plan.result,) * len(self.expected), results)

    def _report_failure(self, group: ProcessGroup, error: Exception) -> NoReturn:
        """Raise the error of a kernel here, and on all ranks, before they wait for the partial results of this rank."""
        if self.shared_at_once:
            in_step_telling(group, lambda: _raise(error))
        elif not all(one.is_floating_point() or one.is_complex() for one in self.call.operands):
            in_op(group, lambda: _raise(error))  # kernels check indices
        notify_of_failure(group, error)  # the others begin the transfer, and find the failure notice there
        raise error

    def _wrap(self, layouts: Sequence[Layout], results: list[Any]) -> Any:
        """Sharded tensors of the results of each box."""
        if self.written is not None:
            return self._finish_write(self.call.sharded()[0])
        flat = [pytree.tree_leaves(one) for one in results]
        self._require_local_sizes(layouts, flat)
        wrapped = []
        for k, (layout, (_, dtype)) in enumerate(zip(layouts, self.expected, strict=True)):
            tensors = [leaves[k] for leaves in flat]
            cls, frame = type(self.call.sharded()[0]), self._frame(layout, dtype)
            wrapped.append(assemble(cls, frame, tensors, self.anchors, self.records))
            wrapped[-1]._moved = not all(self.schedule.in_place)
        return in_schema_form(wrapped, self.call)

    def _finish_write(self, target: ShardedTensorBase) -> ShardedTensorBase:
        """The operand that was written into; all that it is a view of must know of the graph, on every rank."""
        lacks_graph = not target._local_tensors() or target._view_of is not None
        if self.records and lacks_graph and _differentiable(target.dtype):
            note_write(target, tie(self.anchors) if self.anchors else new_anchor(target.device))
        return target

    def _require_local_sizes(self, layouts: Sequence[Layout], flat: list[list[torch.Tensor]]) -> None:
        """Results must fill their boxes: torch may give other sizes than it announced."""
        rank = dist.get_rank() if dist.is_initialized() else -1
        for k, layout in enumerate(layouts):
            for row, leaves in zip(layout.rows_on(rank), flat, strict=True):
                if list(leaves[k].shape) != layout.extent(row):
                    raise unsupported(self.call.op, (), self.call.arguments, "its results have other sizes than said")

    def _frame(self, layout: Layout, dtype: torch.dtype) -> Frame:
        """The frame of an operand with this layout, and so its spec; else a new one."""
        for operand in self.call.sharded():
            if operand._layout == layout:
                return operand._frame.with_dtype(dtype)
        return result_frame(layout, dtype, self.group)


def assemble(
    cls: type[ShardedTensorBase], frame: Frame, tensors: Tensors, anchors: Tensors, records: bool
) -> ShardedTensorBase:
    """The result of an op; on a rank without shards an anchor keeps all that the backward must reach."""
    result = cls._wrap(Parts(frame, tensors))
    result._is_activation = True
    if records and not tensors and _differentiable(frame.dtype):
        result._wants_grad, result._anchor = True, tie(anchors) if anchors else new_anchor(frame.device)
    return result


def assemble_like(
    x: ShardedTensorBase, layout: Layout, tensors: Tensors, anchor: torch.Tensor | None, *more_anchors: torch.Tensor
) -> ShardedTensorBase:
    """A result of the same dtype in another layout, made of one tensor."""
    frame = result_frame(layout, x.dtype, x._frame.process_group)
    anchors = [*([] if anchor is None else [anchor]), *more_anchors]
    return assemble(type(x), frame, tensors, anchors, torch.is_grad_enabled() and x.requires_grad)


def _differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _raise(error: Exception) -> NoReturn:
    raise error


# What all ranks know -------------------------------------------------------------------------------------------------


def common_group(call: Call) -> tuple[ProcessGroup | None, Places]:
    """The group of the sharded operands, and a place on each of its ranks."""
    sharded = call.sharded()
    group = sharded[0]._frame.process_group
    if any(tensor._frame.process_group is not group for tensor in sharded):
        raise ProcessGroupError(
            f"All distributed tensors should use the same ProcessGroup if used together in an op, here '{call.name}': "
            "redistribute one of them with process_group="
        )
    return group, group_places(sharded[0]._layout, group)


def group_places(layout: Layout, group: ProcessGroup | None) -> Places:
    """A place on each rank of a group, of the kind that the layout uses."""
    if group is None or not is_member(group):
        return layout.places.take(np.sort(np.unique(layout.places.distinct[1], return_index=True)[1]))
    return _places_of(group, layout.places)


@cached_per_group()
def _places_of(group: ProcessGroup, places: Places) -> Places:
    return places.for_ranks(rank_array(group))


def result_frame(layout: Layout, dtype: torch.dtype, group: ProcessGroup | None) -> Frame:
    """The frame of a result."""
    rows = layout.rows_on(dist.get_rank()) if group is not None and is_member(group) else ()
    return _frame(group, layout, rows, dtype)


@cached_per_group(maxsize=1024)
def _frame(group: ProcessGroup | None, layout: Layout, rows: tuple[int, ...], dtype: torch.dtype) -> Frame:
    return Frame.of(layout, None, rows, dtype, group)


def _can_share_at_once(call: Call, schedule: Schedule, places: Places, group: ProcessGroup | None) -> bool:
    """Whether partial results are so small that they can travel with the messages by which ranks agree."""
    if group is None or not (talks(group) or record.is_forecast()):
        return False
    if places.device_types != {"cpu"}:  # the host would wait for the values
        return False
    source = make_reduction_plan(schedule, places).transfer.src
    assert schedule.rule.reduction is not None
    itemsize = max(dtype.itemsize for dtype in partial_dtypes(call, schedule.rule.reduction))
    return source.most_elements * itemsize <= room(group)


def op_summary(call: Call) -> OpSummary:
    """What ranks compare before this call sends data."""
    return summary_of(_fields(call))


def summary_of(fields: Fields) -> OpSummary:
    """The same of a call with these fields."""
    nested = active.recorder is not None and active.recorder.nested
    return OpSummary(CallFingerprint(fields), None if nested else str(outer_function))


def _fields(call: Call) -> Fields:
    fields: dict[str, object] = {"op": call.name, "arguments": call.literals()}
    fields["gather_budget"] = settings.current().gather_budget
    for k, operand in enumerate(call.operands):
        about = operand._layout.outline if isinstance(operand, ShardedTensorBase) else tuple(operand.shape)
        records = torch.is_grad_enabled() and operand.requires_grad
        fields[f"operand {k}"] = f"{about} {operand.dtype} requires_grad={records}"
    return fields
