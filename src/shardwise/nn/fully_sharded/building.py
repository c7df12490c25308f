"""Making units of a model's modules: plain parameters become sharded ones whose shards lie in flat memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

    def elements(self, number: int) -> int:
        """How many elements a row holds."""
        return sum(entry.elements for entry in self.row(number)[1])

    @property
    def stays_whole(self) -> bool:
        """Whether no box may be cut, in any row."""
        entries = [entry for row in self.entries for entry in row]
        return all(entry.is_whole for entry in entries) and any(entry.elements > 1 for entry in entries)


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
        """For each row, which of its ranks gets which parameters whole; of what all rows hold, in each row alike."""
        common = {name: held.elements(0) for name, held in self._whole.items() if len(held.boxes) == 1}
        alike, found = deal_whole(common, self.loads[0]), []
        for row, loads in enumerate(self.loads):
            own = {name: held.elements(row) for name, held in self._whole.items() if len(held.boxes) > 1}
            found.append(alike | deal_whole(own, loads.with_dealt(common, alike)))
        return found

    @property
    def _whole(self) -> dict[str, Held]:
        """Parameters of which no box is cut. The same on every rank."""
        return {name: held for name, held in self.held.items() if held.stays_whole}

    def _memories(self, choice: UnitChoice, dealt: Sequence[Mapping[str, int]]) -> list[FlatMemory]:
        """One for each dtype, of parameters with and without gradients, whole or cut, of another plan or of none."""
        kinds: dict[tuple[torch.dtype, bool, bool, bool], list[str]] = {}
        for name, slots in choice.parameters.items():
            one, is_whole = slots[0].get(), self.held[name].stays_whole
            kinds.setdefault((one.dtype, one.requires_grad, is_whole, is_cut(one)), []).append(name)
        return [self._memory(choice, names, dealt if whole else None) for (_, _, whole, _), names in kinds.items()]

    def _memory(
        self, choice: UnitChoice, names: Sequence[str], dealt: Sequence[Mapping[str, int]] | None
    ) -> FlatMemory:
        """The memory of these parameters; each rank gets those that were dealt to it, or its share of all."""
        first: torch.Tensor = choice.parameters[names[0]][0].get()
        groups = replace(self.groups, column=None) if is_cut(first) else self.groups
        rows = self._cut_rows(names, dealt, alike=not is_cut(first))
        own = self.groups.row_number
        entries, edges = rows[own]
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
        begins = [_begins(row) for row, _ in rows]
        for name in sorted(names, key=lambda name: begins[own][self.held[name].row(own)[1][0].name]):
            made = Stretches()
            for row, ranks in enumerate(self.groups.ranks.tolist()):
                for box, entry in zip(*self.held[name].row(row), strict=True):
                    made.add(box, begins[row][entry.name], rows[row][1], ranks)
            memory.parameters.append(self._parameter(memory, name, choice.parameters[name], made, begins[own], edges))
        step_flat(memory)
        return memory

    def _cut_rows(
        self, names: Sequence[str], dealt: Sequence[Mapping[str, int]] | None, *, alike: bool
    ) -> list[tuple[list[FlatEntry], list[int]]]:
        """For each row, its entries one behind another and the edges between its ranks; all the same, if alike."""
        rows = []
        for row, loads in enumerate(self.loads[:1] if alike else self.loads):
            rows.append(self._cut_row(row, loads, names, None if dealt is None else dealt[row]))
        for loads in self.loads[len(rows) :]:
            loads.add(rows[0][1])
        return rows if len(rows) > 1 else rows * len(self.groups.ranks)

    def _cut_row(
        self, row: int, loads: Loads, names: Sequence[str], dealt: Mapping[str, int] | None
    ) -> tuple[list[FlatEntry], list[int]]:
        """The entries of a row one behind another, and the edges between its ranks."""
        names = names if dealt is None else sorted(names, key=lambda name: dealt[name])
        entries = [entry for name in names for entry in self.held[name].row(row)[1]]
        if dealt is None:
            return entries, cut_divisible(entries, loads)
        sizes = [0] * self.groups.parts
        for name in names:
            sizes[dealt[name]] += self.held[name].elements(row)
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
        vars(new).update({key: value for key, value in vars(old).items() if key not in own})  # that others set
        for slot in slots:
            slot.put(new)
        note_replaced(old, new)
        gathered = old._frame.with_dtype(memory.gathered_dtype) if is_cut(old) else None
        return FlatParameter(name, entries, slots, cast(ShardedTensor, new), stretches, gathered)


def _begins(entries: Sequence[FlatEntry]) -> dict[str, int]:
    """Where each entry begins in flat memory."""
    begins = [0, *accumulate(entry.elements for entry in entries[:-1])]
    return {entry.name: begin for entry, begin in zip(entries, begins, strict=True)}


def _device_of(parameter: torch.Tensor, group: ProcessGroup) -> torch.device:
    """Where a parameter is, if the group moves memory from there; else the device that this rank uses."""
    kind = device_for(parameter.device.type, group)
    return parameter.device if parameter.device.type == kind else rank_device(dist.get_rank(), kind)
