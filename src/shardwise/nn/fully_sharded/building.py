"""Making units of a model's modules: plain parameters become sharded ones whose shards lie in flat memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.errors import PlanError
from shardwise.layout.placement import device_for, rank_device
from shardwise.layout.specs import FixedShardingSpec
from shardwise.nn.fully_sharded.cuts import ELEMENTS, Align, Box, FlatEntry, Loads, cut_divisible, deal_whole, unit_of
from shardwise.nn.fully_sharded.flat_memory import FlatMemory, FlatParameter, Precision, Stretches
from shardwise.nn.fully_sharded.flat_steps import step_flat
from shardwise.nn.fully_sharded.rank_groups import RankGroups
from shardwise.nn.fully_sharded.row_boxes import is_cut, row_boxes
from shardwise.nn.fully_sharded.unit import Unit
from shardwise.nn.fully_sharded.unit_choice import UnitChoice
from shardwise.nn.replaced_parameters import note_replaced
from shardwise.nn.sharding_plan.tree import ModuleSlot, matches
from shardwise.tensor import ShardedTensor, shard_tensor
from shardwise.tensor.frame import Frame, Parts
from shardwise.tensor.wrapper import Wrapper
from shardwise.torch_private import FakeTensor


@dataclass(frozen=True)
class Held:
    """What rows of ranks hold of a parameter: boxes, each of which is an entry of the row's flat memory."""

    boxes: list[list[Box]]  # by row; one list where all rows hold the whole parameter
    entries: list[tuple[FlatEntry, ...]]  # the same as entries

    def row(self, number: int) -> tuple[list[Box], tuple[FlatEntry, ...]]:
        """Of one row."""
        number = number if len(self.boxes) > 1 else 0
        return self.boxes[number], self.entries[number]


def held_by_rows(
    choices: Sequence[UnitChoice], align: Align | Mapping[str, Align], groups: RankGroups
) -> dict[str, Held]:
    """All parameters by name, with what of each stays together."""
    found = {}
    for name, slots in _parameters(choices):
        parameter = slots[0].get()
        if type(parameter) not in (nn.Parameter, FakeTensor) and not isinstance(parameter, ShardedTensor):
            raise PlanError(f"{name!r} is a {type(parameter).__name__}: fully_shard takes a model of plain parameters")
        how, boxes = _align_of(name, align), row_boxes(name, parameter, groups)
        found[name] = Held(boxes, [tuple(_entries(name, row, how)) for row in boxes])
    return found


def _entries(name: str, boxes: Sequence[Box], align: Align) -> Iterator[FlatEntry]:
    for number, (_, shape) in enumerate(boxes):
        yield FlatEntry(name if len(boxes) == 1 else f"{name}, box {number}", shape, unit_of(align, shape))


def _parameters(choices: Sequence[UnitChoice]) -> Iterator[tuple[str, tuple[ModuleSlot, ...]]]:
    return (pair for choice in choices for pair in choice.parameters.items())


def _align_of(name: str, align: Align | Mapping[str, Align]) -> Align:
    if not isinstance(align, Mapping):
        return align
    return next((how for pattern, how in align.items() if matches(pattern, name)), ELEMENTS)


@dataclass(frozen=True)
class UnitBuilder:
    """How all units of a model are made."""

    held: Mapping[str, Held]
    loads: Sequence[Loads]  # by row; one where all rows hold the same
    groups: RankGroups
    precision: Precision
    src_rank: int
    offload: bool

    def units(self, choices: Sequence[UnitChoice]) -> list[Unit]:
        """The units. Each plain parameter is freed before the next unit is made."""
        dealt = self._deal()
        samples_apart = not any(len(held.boxes) > 1 for held in self.held.values())
        return [
            Unit(
                one.path,
                one.module,
                self._memories(one, dealt),
                self.groups.everyone,
                self.precision.parameters,
                may_compute_locally=samples_apart,
            )
            for one in choices
        ]

    def _deal(self) -> list[dict[str, int]]:
        """For each row, which of its ranks gets which whole entry. Of what all rows hold, each row deals it alike."""
        common = [held.entries[0] for held in self.held.values() if len(held.boxes) == 1]
        alike = deal_whole(_whole_entries(common), self.loads[0])
        found = []
        for row, loads in enumerate(self.loads):
            own = _whole_entries(held.entries[row] for held in self.held.values() if len(held.boxes) > 1)
            found.append(alike | deal_whole(own, loads.with_dealt(_whole_entries(common), alike)))
        return found

    def _memories(self, choice: UnitChoice, dealt: Sequence[Mapping[str, int]]) -> list[FlatMemory]:
        """One for each dtype, of parameters with and without gradients, whole or cut, of another plan or of none."""
        kinds: dict[tuple[torch.dtype, bool, bool, bool], list[str]] = {}
        for name, slots in choice.parameters.items():
            one, is_dealt = slots[0].get(), _stays_whole(self.held[name].entries[0][0])
            kinds.setdefault((one.dtype, one.requires_grad, is_dealt, is_cut(one)), []).append(name)
        return [self._memory(choice, names, dealt if whole else None) for (_, _, whole, _), names in kinds.items()]

    def _memory(
        self, choice: UnitChoice, names: Sequence[str], dealt: Sequence[Mapping[str, int]] | None
    ) -> FlatMemory:
        """The memory of these parameters; each rank gets those that were dealt to it, or its share of all."""
        first: torch.Tensor = choice.parameters[names[0]][0].get()
        groups = replace(self.groups, column=None) if is_cut(first) else self.groups
        rows = []
        for row in range(len(self.loads) if is_cut(first) else 1):
            rows.append(self._cut_row(row, self.loads[row], names, None if dealt is None else dealt[row]))
        for loads in self.loads[len(rows) :]:
            loads.add(rows[0][1])
        entries, edges = rows[self.groups.row_number if len(rows) > 1 else 0]
        memory = FlatMemory(
            choice.path or "the rest of the model",
            entries,
            edges,
            groups,
            first.dtype,
            _device_of(first, self.groups.everyone),
            self.precision,
            self.offload,
        )
        begins = [dict(zip((one.name for one in row), _begins(row), strict=True)) for row, _ in rows]
        order = {entry.name: number for number, entry in enumerate(entries)}
        own = self.groups.row_number
        for name in sorted(names, key=lambda name: order[self.held[name].row(own)[1][0].name]):
            made = Stretches()
            for row, ranks in enumerate(self.groups.ranks.tolist()):
                number = row if len(rows) > 1 else 0
                for box, entry in zip(*self.held[name].row(row), strict=True):
                    made.add(box, begins[number][entry.name], rows[number][1], ranks)
            begin = begins[own if len(rows) > 1 else 0]
            memory.parameters.append(self._parameter(memory, name, choice.parameters[name], made, begin, edges))
        step_flat(memory)
        return memory

    def _cut_row(
        self, row: int, loads: Loads, names: Sequence[str], dealt: Mapping[str, int] | None
    ) -> tuple[list[FlatEntry], list[int]]:
        """The entries of a row one behind another, and the edges between its ranks."""
        entries = [entry for name in names for entry in self.held[name].row(row)[1]]
        if dealt is None:
            return entries, cut_divisible(entries, loads)
        entries.sort(key=lambda entry: dealt[entry.name])
        sizes = [0] * self.groups.parts
        for entry in entries:
            sizes[dealt[entry.name]] += entry.elements
        edges = [0, *accumulate(sizes)]
        loads.add(edges)
        return entries, edges

    def _parameter(
        self,
        memory: FlatMemory,
        name: str,
        slots: tuple[ModuleSlot, ...],
        made: Stretches,
        begins: Mapping[str, int],
        edges: Sequence[int],
    ) -> FlatParameter:
        """A sharded parameter in place of a plain one, or of one cut by another plan, with its values if it has any."""
        old = slots[0].get()
        layout = made.layout(old.shape, memory.shard.device.type)
        rows, starts = layout.rows_on(dist.get_rank()), made.starts
        ends = [starts[row] + torch.Size(layout.extent(row)).numel() for row in rows]
        stretches = tuple((starts[row], end) for row, end in zip(rows, ends, strict=True))
        shards = [
            memory.shard[low:high].view(layout.extent(row)) for row, (low, high) in zip(rows, stretches, strict=True)
        ]
        entries = self.held[name].row(self.groups.row_number)[1]
        if isinstance(old, ShardedTensor):
            low, high = edges[self.groups.part], edges[self.groups.part + 1]
            for entry, local in zip(entries, () if old.is_meta else old._local_tensors(), strict=not old.is_meta):
                begin = begins[entry.name]
                first, last = max(low, begin), min(high, begin + entry.elements)
                if first < last:
                    memory.shard[first - low : last - low].copy_(
                        local.detach().reshape(-1)[first - begin : last - begin]
                    )
        elif not old.is_meta:
            values = shard_tensor(old.detach(), FixedShardingSpec.of(layout), self.src_rank, self.groups.everyone)
            for shard, value in zip(shards, values._local_tensors(), strict=True):
                shard.copy_(value)
        frame = Frame.of(layout, None, rows, memory.dtype, self.groups.everyone)
        new = nn.Parameter(ShardedTensor._wrap(Parts(frame, [shard.detach() for shard in shards])), old.requires_grad)
        own = vars(new).keys() | vars(Wrapper).keys() if isinstance(old, ShardedTensor) else set[str]()
        vars(new).update({name: value for name, value in vars(old).items() if name not in own})  # that others set
        for slot in slots:
            slot.put(new)
        note_replaced(old, new)
        gathered = old._frame.with_dtype(memory.gathered_dtype) if is_cut(old) else None
        return FlatParameter(name, entries, slots, cast(ShardedTensor, new), stretches, gathered)


def _stays_whole(entry: FlatEntry) -> bool:
    return entry.is_whole and entry.elements > 1


def _whole_entries(entries: Iterable[Sequence[FlatEntry]]) -> dict[str, int]:
    """The sizes of those that are not cut at all."""
    return {one.name: one.elements for some in entries for one in some if _stays_whole(one)}


def _begins(entries: Sequence[FlatEntry]) -> list[int]:
    """Where each entry begins in flat memory."""
    return [0, *accumulate(entry.elements for entry in entries[:-1])]


def _device_of(parameter: torch.Tensor, group: ProcessGroup) -> torch.device:
    """Where a parameter is, if the group moves memory from there; else the device that this rank uses."""
    kind = device_for(parameter.device.type, group)
    return parameter.device if parameter.device.type == kind else rank_device(dist.get_rank(), kind)
