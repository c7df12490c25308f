"""Carrying out a rule: bring the operands where the schedule wants them, call the op on each cell, wrap the results."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree

from shardwise import settings
from shardwise.dispatch import unsupported
from shardwise.errors import ProcessGroupError, UnsupportedOpError
from shardwise.layout import Layout, Places
from shardwise.meeting import leave_word
from shardwise.ops.engine.call import Call, function
from shardwise.ops.engine.cells import without_repeats
from shardwise.ops.engine.recorder import watch
from shardwise.ops.engine.rule import Reduction, Rule
from shardwise.ops.engine.schedule import Operand, Schedule, make_joining, make_schedule, size_of
from shardwise.ops.engine.steps import Bring, CutPlain, Move, OpSaid, Shared, Tied, as_it_lies, brought, done
from shardwise.process_group import Fields, Said, in_op, in_step_telling, is_member, kept_for, rank_array, room, talks
from shardwise.sharded_tensor import ShardedTensorBase
from shardwise.sharded_tensor.frame import Frame, Parts
from shardwise.sharded_tensor.gradients import new_anchor, note_write
from shardwise.sharded_tensor.moved_once import kept_layout, passes
from shardwise.sharded_tensor.recorded_backward import tie
from shardwise.sharded_tensor.strides import Strides, strides_of
from shardwise.tracing import record
from shardwise.transfer import make_plan

Tensors = list[torch.Tensor]


def compute(call: Call, rule: Rule, *, lead: int | None = None, moves: bool = True, partial: Call | None = None) -> Any:
    """The op under this rule, or NotImplemented when no schedule is within the gather budget.

    Where operands move, every rank of the group takes part; without ``moves``, that is NotImplemented too. With a
    ``lead``, that operand is written into. With ``partial``, that call is computed instead, on the same operands, where
    results are sums of what several cells contribute.
    """
    expected = expect(call)
    _require_agreement_of(rule, expected, call)
    group, everyone = meeting(call)
    keeps = not gives_its_operand(call.op)
    operands = tuple(_known(operand, keeps=keeps) for operand in call.operands)
    schedule = make_schedule(rule, operands, everyone, settings.current().gather_budget, lead)
    if schedule is None or (schedule.moved and not moves):
        return NotImplemented
    if partial is not None and schedule.partial:
        call, expected = partial, expect(partial)
    return _Computation(call, rule, schedule, group, everyone, expected, lead).run()


def _known(operand: torch.Tensor, *, keeps: bool) -> Operand:
    """What every rank knows of an operand."""
    if not isinstance(operand, ShardedTensorBase):
        return Operand(None, operand.dtype.itemsize)
    returns = torch.is_grad_enabled() and operand.requires_grad
    also = kept_layout(operand) if keeps else None
    return Operand(operand._layout, operand.dtype.itemsize, returns, passes(operand), also)


@lru_cache(maxsize=4096)
def gives_its_operand(op: Any) -> bool:
    """Whether a result may be the memory of an operand, as of a view or a reshape. Then nobody else may have that."""
    return any(one.alias_info is not None for one in op._schema.returns)


class _Computation:
    """One call under one schedule."""

    def __init__(
        self,
        call: Call,
        rule: Rule,
        schedule: Schedule,
        group: ProcessGroup | None,
        everyone: Places,
        expected: list[tuple[torch.Size, torch.dtype]],
        lead: int | None,
    ) -> None:
        self.call, self.rule, self.schedule = call, rule, schedule  # which may have been made for a rule that is equal
        self.group, self.everyone, self.expected, self.lead = group, everyone, expected, lead
        # Whether partial results are so small that they are told to all while the ranks agree.
        self.tells = schedule.partial and not schedule.moved and _can_tell(call, schedule, everyone, group)
        self.here = schedule.cells.rows_on(dist.get_rank() if dist.is_initialized() else -1)
        self.records = torch.is_grad_enabled() and any(operand.requires_grad for operand in call.operands)
        self.anchors: Tensors = []
        # Kernels look at indices: what they find wrong is told to the others before they count on this rank.
        self.checks = schedule.partial and not self.tells and not all(map(_has_fractions, call.operands))

    def run(self) -> Any:
        """The results, as the op gives them, sharded."""
        brought = [self._bring(number) for number in range(len(self.call.operands))]
        per_cell = [[tensors[k] for tensors in brought] for k in range(len(self.here))]
        if self.schedule.partial:
            return self._reduced(per_cell)
        found = [self._local(row, tensors) for row, tensors in zip(self.here, per_cell, strict=True)]
        return self._wrapped(self.schedule.results, found)

    def _bring(self, number: int) -> Tensors:
        """One tensor of this operand for each cell that is here."""
        operand, target = self.call.operands[number], self.schedule.operands[number]
        if not isinstance(operand, ShardedTensorBase):
            return self._cut(operand, number)
        if not self.schedule.stays[number]:
            assert self.group is not None
            record = torch.is_grad_enabled() and operand.requires_grad
            keeps = not gives_its_operand(self.call.op)
            target, same = without_repeats(target) if keeps else (target, None)
            plan = make_plan(operand._layout, target)
            found = brought(Bring(plan, self.group, said_of(self.call), record, keeps), operand)
            if same is not None:
                rows = target.rows_on(dist.get_rank())
                self.anchors += found[len(rows) :]
                return [found[rows.index(int(same[row]))] for row in self.here]
        elif number != self.lead and operand._layout.has_replicas:
            found = as_it_lies(operand)
        else:  # as it is, not a view of it
            found, anchor = operand._local_tensors(), operand._anchored()
            found = found if anchor is None else [*found, anchor]
        self.anchors += found[len(self.here) :]
        return found[: len(self.here)]

    def _cut(self, operand: torch.Tensor, number: int) -> Tensors:
        """What each cell needs of a plain operand, which is the same on every rank."""
        layout = self.schedule.operands[number]
        if torch.is_grad_enabled() and operand.requires_grad:
            if self.group is not None and not operand.is_leaf and layout.is_partition and is_member(self.group):
                *parts, anchor = done(CutPlain(layout, self.group), operand)
                self.anchors.append(anchor)
                return parts
            (operand,) = done(Shared(self.group), operand)
        if operand.requires_grad and not self.here:
            self.anchors.append(tie([operand]))
        if gives_its_operand(self.call.op):  # never the operand itself
            return [operand[layout.index(row)] if operand.ndim else operand for row in self.here]
        size = list(operand.shape)
        return [operand if layout.extent(row) == size else operand[layout.index(row)] for row in self.here]

    def _local(self, row: int, tensors: Tensors) -> Any:
        changes = {}
        if self.rule.adapt is not None:
            changes = self.rule.adapt(self.call, [layout.extent(row) for layout in self.schedule.results])
        if self.rule.contiguous:
            tensors = [tensor.contiguous() for tensor in tensors]
        return self.call.run(tensors, **changes)

    def _reduced(self, per_cell: list[Tensors]) -> Any:
        """The results of a reduction whose label is cut: each cell's part, stacked where it is reduced again."""
        reduction, group = self.rule.reduction, self.group
        assert reduction is not None
        assert group is not None
        joining = make_joining(self.schedule, self.everyone)
        meta = expect_partial(self.call, reduction)
        partials: list[tuple[torch.Tensor, ...]] = []
        failed: Exception | None = None
        for row, tensors in zip(self.here, per_cell, strict=True):
            if not joining.takes(row):
                self.anchors.append(tie(tensors))
                continue
            try:
                made = reduction.partial(self.call, tensors) if reduction.partial else self.call.run(tensors)
            except Exception as error:
                failed = error
                break
            partials.append(made if isinstance(made, tuple) else (made,))
        if failed is not None:
            self._tell(group, failed)
        joined: list[Tensors] = []
        anchor = done(Tied(), *self.anchors)[0] if self.anchors else None
        count = len(joining.plan.dst.rows_on(dist.get_rank()))
        for k, dtype in enumerate(meta):
            parts = [partial[k].unsqueeze(0) if joining.stacked else partial[k] for partial in partials]
            parts = [part.contiguous() for part in parts]
            record, tells = self.records and _differentiable(dtype), self.tells and k == 0
            fill = reduction.fills(dtype)[k]
            move = Move(joining.plan, group, said_of(self.call), record, dtype, fill, tells)
            arrived = done(move, anchor, *parts)
            joined.append(arrived[:count])
            self.anchors += arrived[count:]
        found: list[Any] = joined[0]
        if joining.stacked:
            found = [reduction.again(self.call, list(pieces)) for pieces in zip(*joined, strict=True)]
        return self._wrapped((joining.result,) * len(self.expected), found)

    def _tell(self, group: ProcessGroup, failed: Exception) -> NoReturn:
        """Before partial results are sent: what a kernel found wrong with them here is told to all ranks."""
        if self.tells:
            in_step_telling(group, lambda: raised(failed))
        elif self.checks:
            in_op(group, lambda: raised(failed))
        leave_word(group, failed)  # the others are on their way into the transfer, and find word of it there
        raise failed

    def _require_sizes(self, layouts: Sequence[Layout], flat: list[list[torch.Tensor]]) -> None:
        """What was computed must fill the boxes: torch may give results that it did not announce."""
        rank = dist.get_rank() if dist.is_initialized() else -1
        for k, layout in enumerate(layouts):
            for row, leaves in zip(layout.rows_on(rank), flat, strict=True):
                if list(leaves[k].shape) != layout.extent(row):
                    raise unsupported(self.call.op, (), self.call.arguments, "its results have other sizes than said")

    def _written(self, target: ShardedTensorBase) -> ShardedTensorBase:
        """The operand that was written into; all that it is a view of must know of the graph, on every rank."""
        lacks = not target._local_tensors() or target._view_of is not None
        if self.records and lacks and _differentiable(target.dtype):
            note_write(target, tie(self.anchors) if self.anchors else new_anchor(target.device))
        return target

    def _frame(self, layout: Layout, dtype: torch.dtype) -> Frame:
        """The frame of an operand that is sharded alike, and so its spec; else a new one."""
        for operand in self.call.sharded():
            if operand._layout == layout:
                return operand._frame.with_dtype(dtype)
        return frame_of(layout, dtype, self.group)

    def _wrapped(self, layouts: Sequence[Layout], found: list[Any]) -> Any:
        """Sharded tensors of what was found in each box."""
        if self.lead is not None:
            return self._written(self.call.sharded()[0])
        flat = [pytree.tree_leaves(one) for one in found]
        self._require_sizes(layouts, flat)
        made = []
        for k, (layout, (_, dtype)) in enumerate(zip(layouts, self.expected, strict=True)):
            frame = self._frame(layout, dtype)
            tensors = [leaves[k] for leaves in flat]
            made.append(assemble(type(self.call.sharded()[0]), frame, tensors, self.anchors, self.records))
            made[-1]._moved = not all(self.schedule.stays)
        return shaped_as(made, self.call)


def assemble(
    kind: type[ShardedTensorBase], frame: Frame, tensors: Tensors, anchors: Tensors, records: bool
) -> ShardedTensorBase:
    """The result of an op; a rank without shards keeps what its backward must reach as an anchor."""
    made = kind._wrap(Parts(frame, tensors))
    made._passes = True
    if records and not tensors and _differentiable(frame.dtype):
        made._wants_grad, made._anchor = True, tie(anchors) if anchors else new_anchor(frame.device)
    return made


def _differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


# What all ranks know -----------------------------------------------------------------------------------------------


def meeting(call: Call) -> tuple[ProcessGroup | None, Places]:
    """The group of the sharded operands, and a place on each of its ranks."""
    sharded = call.sharded()
    group = sharded[0]._frame.process_group
    if any(tensor._frame.process_group is not group for tensor in sharded):
        raise ProcessGroupError(
            f"All distributed tensors should use the same ProcessGroup if used together in an op, here '{call.name}': "
            "redistribute one of them with process_group="
        )
    return group, places_of(sharded[0]._layout, group)


def places_of(layout: Layout, group: ProcessGroup | None) -> Places:
    """A place on each rank of a group, of the kind that the layout uses."""
    if group is None or not is_member(group):
        return layout.places.take(np.sort(np.unique(layout.places.distinct[1], return_index=True)[1]))
    return kept_for(group, layout.places, lambda: layout.places.for_ranks(rank_array(group)))


def frame_of(layout: Layout, dtype: torch.dtype, group: ProcessGroup | None) -> Frame:
    """The frame of a result."""
    rows = layout.rows_on(dist.get_rank()) if group is not None and is_member(group) else ()
    return _frame(layout, rows, dtype, group)


@lru_cache(maxsize=1024)
def _frame(layout: Layout, rows: tuple[int, ...], dtype: torch.dtype, group: ProcessGroup | None) -> Frame:
    return Frame.of(layout, None, rows, dtype, group)


def _has_fractions(operand: torch.Tensor) -> bool:
    return operand.is_floating_point() or operand.is_complex()


def raised(error: Exception) -> NoReturn:
    """As work that failed."""
    raise error


def _can_tell(call: Call, schedule: Schedule, everyone: Places, group: ProcessGroup | None) -> bool:
    """Whether there is somebody to tell the partial results to, and they are so small that they can be told."""
    asked = group is not None and (talks(group) or record.is_forecast())
    if group is None or not asked or everyone.device_types != {"cpu"}:  # whose values the host need not wait for
        return False
    source = make_joining(schedule, everyone).plan.src
    assert schedule.rule.reduction is not None
    itemsize = max(dtype.itemsize for dtype in expect_partial(call, schedule.rule.reduction))
    return source.most_elements * itemsize <= room(group)


def said_of(call: Call) -> OpSaid:
    """What must be the same on every rank of a call."""
    recorder = watch.current
    inside = recorder is not None and recorder.inside
    return OpSaid(Said(_fields(call)), None if inside else str(function))


def _fields(call: Call) -> Fields:
    fields: dict[str, object] = {"op": call.name, "arguments": call.settings()}
    fields["gather_budget"] = settings.current().gather_budget
    for k, operand in enumerate(call.operands):
        about = operand._layout.outline if isinstance(operand, ShardedTensorBase) else tuple(operand.shape)
        records = torch.is_grad_enabled() and operand.requires_grad
        fields[f"operand {k}"] = f"{about} {operand.dtype} requires_grad={records}"
    return fields


def expect(call: Call) -> list[tuple[torch.Size, torch.dtype]]:
    """Size and dtype of each result, known on every rank: the op on whole tensors without data."""
    try:
        key = torch.get_default_dtype(), call.key()
        found = _expected.get(key)
    except TypeError:  # an argument that cannot be hashed
        return _on_meta(call)
    if found is None:
        if len(_expected) > MOST_EXPECTED:
            _expected.clear()
        found = _expected[key] = _on_meta(call)
    return found


_expected: dict[Any, list[tuple[torch.Size, torch.dtype]]] = {}  # a cache, by what the answer depends on
MOST_EXPECTED = 4096


def results_strides(call: Call, count: int) -> list[Strides | None]:
    """The strides that each result would have as a plain tensor, None where that is contiguous. The same everywhere."""
    lying = tuple(one._strides if isinstance(one, ShardedTensorBase) else strides_of(one) for one in call.operands)
    try:
        key = call.key(), lying
        found = _lying.get(key)
    except TypeError:  # an argument that cannot be hashed
        key, found = None, None
    if found is None:
        found = _strides_on_meta(call, lying)
        if key is not None:
            if len(_lying) > MOST_EXPECTED:
                _lying.clear()
            _lying[key] = found
    return found if len(found) == count else [None] * count


_lying: dict[Any, list[Strides | None]] = {}  # a cache, by what the answer depends on


def _strides_on_meta(call: Call, lying: Sequence[Strides | None]) -> list[Strides | None]:
    stand_ins = [
        torch.empty(one.shape, dtype=one.dtype, device="meta")
        if strides is None
        else torch.empty_strided(one.shape, strides, dtype=one.dtype, device="meta")
        for one, strides in zip(call.operands, lying, strict=True)
    ]
    changes = {"device": "meta"} if call.arguments.get("device") is not None else {}
    try:
        with torch.no_grad():
            result = call.run(stand_ins, **changes)
    except Exception:  # of an op that torch cannot compute so: a view that copies, say
        return []
    return [strides_of(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


class UnknownResultError(Exception):
    """torch cannot say what an op gives without computing it: then no rule can."""


def _on_meta(call: Call) -> list[tuple[torch.Size, torch.dtype]]:
    with torch.no_grad():
        stand_ins = [torch.empty(operand.shape, dtype=operand.dtype, device="meta") for operand in call.operands]
        changes = {"device": "meta"} if call.arguments.get("device") is not None else {}
        try:
            result = call.run(stand_ins, **changes)
        except NotImplementedError as error:
            raise UnknownResultError from error
    return [(leaf.shape, leaf.dtype) for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def expect_partial(call: Call, reduction: Reduction) -> list[torch.dtype]:
    """The dtypes of what a cell contributes to a reduction."""
    if reduction.partial is None:
        return [dtype for _, dtype in expect(call)]
    with torch.no_grad():
        stand_ins = [torch.empty(operand.shape, dtype=operand.dtype, device="meta") for operand in call.operands]
        return [partial.dtype for partial in reduction.partial(call, stand_ins)]


def _require_agreement_of(rule: Rule, expected: list[tuple[torch.Size, torch.dtype]], call: Call) -> None:
    """A rule must say what torch says: a wrong one raises, and never gives a wrong result."""
    said = [tuple(size_of(rule, dims)) for dims in rule.results]
    found = [tuple(size) for size, _ in expected]
    if said != found:
        raise UnsupportedOpError(f"the rule for {call.name} gives results of sizes {said}, torch gives {found}")


def shaped_as(made: Sequence[Any], call: Call) -> Any:
    """The results in the form in which the op gives them: one tensor, a tuple, or a list."""
    if not call.op._schema.returns:
        return None
    if len(call.op._schema.returns) == 1:
        return list(made) if str(call.op._schema.returns[0].type).startswith("List") else made[0]
    return tuple(made)
