"""Making units of a model's modules: plain parameters become sharded ones whose shards lie in flat memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.errors import PlanError
from shardwise.layout import Layout
from shardwise.layout.placement import device_for, rank_device
from shardwise.layout.specs import FixedShardingSpec
from shardwise.nn.fully_sharded.cuts import ELEMENTS, Align, FlatEntry, Loads, cut_divisible, deal_whole, unit_of
from shardwise.nn.fully_sharded.flat_memory import FlatMemory, FlatParameter, Precision, layout_of
from shardwise.nn.fully_sharded.flat_steps import step_flat
from shardwise.nn.fully_sharded.rank_groups import RankGroups
from shardwise.nn.fully_sharded.unit import Unit
from shardwise.nn.fully_sharded.unit_choice import UnitChoice
from shardwise.nn.sharding_plan.tree import ModuleSlot, matches
from shardwise.tensor import ShardedTensor, shard_tensor
from shardwise.tensor.frame import Frame, Parts


def entries_of(choices: Sequence[UnitChoice], align: Align | Mapping[str, Align]) -> dict[str, FlatEntry]:
    """All parameters by name, with what of each stays together."""
    found = {}
    for name, slots in _parameters(choices):
        parameter = slots[0].get()
        if type(parameter) is not nn.Parameter:
            raise PlanError(f"{name!r} is a {type(parameter).__name__}: fully_shard takes a model of plain parameters")
        shape = tuple(parameter.shape)
        found[name] = FlatEntry(name, shape, unit_of(_align_of(name, align), shape))
    return found


def _parameters(choices: Sequence[UnitChoice]) -> Iterator[tuple[str, tuple[ModuleSlot, ...]]]:
    return (pair for choice in choices for pair in choice.parameters.items())


def _align_of(name: str, align: Align | Mapping[str, Align]) -> Align:
    if not isinstance(align, Mapping):
        return align
    return next((how for pattern, how in align.items() if matches(pattern, name)), ELEMENTS)


@dataclass(frozen=True)
class UnitBuilder:
    """How all units of a model are made."""

    entries: Mapping[str, FlatEntry]
    loads: Loads
    groups: RankGroups
    precision: Precision
    src_rank: int
    offload: bool

    def units(self, choices: Sequence[UnitChoice]) -> list[Unit]:
        """The units. Each plain parameter is freed before the next unit is made."""
        whole = {name: one.elements for name, one in self.entries.items() if one.is_whole and one.elements > 1}
        dealt = deal_whole(whole, self.loads)
        return [
            Unit(one.path, one.module, self._memories(one, dealt), self.groups.everyone, self.precision.parameters)
            for one in choices
        ]

    def _memories(self, choice: UnitChoice, dealt: Mapping[str, int]) -> list[FlatMemory]:
        """One for each dtype, of parameters with and without gradients, whole or cut."""
        kinds: dict[tuple[torch.dtype, bool, bool], list[str]] = {}
        for name, slots in choice.parameters.items():
            one = slots[0].get()
            kinds.setdefault((one.dtype, one.requires_grad, name in dealt), []).append(name)
        return [
            self._dealt(choice, names, dealt) if whole else self._cut(choice, names)
            for (_, _, whole), names in kinds.items()
        ]

    def _cut(self, choice: UnitChoice, names: Sequence[str]) -> FlatMemory:
        entries = [self.entries[name] for name in names]
        return self._memory(choice, entries, cut_divisible(entries, self.loads))

    def _dealt(self, choice: UnitChoice, names: Sequence[str], dealt: Mapping[str, int]) -> FlatMemory:
        """Parameters that stay whole, those of a rank one behind another."""
        entries = [self.entries[name] for name in sorted(names, key=lambda name: dealt[name])]
        sizes = [0] * self.groups.parts
        for entry in entries:
            sizes[dealt[entry.name]] += entry.elements
        edges = [0, *accumulate(sizes)]
        self.loads.add(edges)
        return self._memory(choice, entries, edges)

    def _memory(self, choice: UnitChoice, entries: Sequence[FlatEntry], edges: Sequence[int]) -> FlatMemory:
        first: torch.Tensor = choice.parameters[entries[0].name][0].get()
        device = _device_of(first, self.groups.everyone)
        memory = FlatMemory(
            choice.path or "the rest of the model",
            entries,
            edges,
            self.groups,
            first.dtype,
            device,
            self.precision,
            self.offload,
        )
        begin = 0
        for entry in entries:
            layout, starts = layout_of(entry, begin, edges, self.groups.ranks, memory.shard.device.type)
            memory.parameters.append(self._parameter(memory, entry, choice.parameters[entry.name], layout, starts))
            begin += entry.elements
        step_flat(memory)
        return memory

    def _parameter(
        self, memory: FlatMemory, entry: FlatEntry, slots: tuple[ModuleSlot, ...], layout: Layout, starts: Sequence[int]
    ) -> FlatParameter:
        """A sharded parameter in place of a plain one, with its values if it has any."""
        old, rows = slots[0].get(), layout.rows_on(dist.get_rank())
        ends = [starts[row] + torch.Size(layout.extent(row)).numel() for row in rows]
        stretches = tuple((starts[row], end) for row, end in zip(rows, ends, strict=True))
        shards = [
            memory.shard[low:high].view(layout.extent(row)) for row, (low, high) in zip(rows, stretches, strict=True)
        ]
        if not old.is_meta:
            values = shard_tensor(old.detach(), FixedShardingSpec.of(layout), self.src_rank, self.groups.everyone)
            for shard, value in zip(shards, values._local_tensors(), strict=True):
                shard.copy_(value)
        frame = Frame.of(layout, None, rows, memory.dtype, self.groups.everyone)
        new = nn.Parameter(ShardedTensor._wrap(Parts(frame, [shard.detach() for shard in shards])), old.requires_grad)
        vars(new).update(vars(old))  # attributes that others set
        for slot in slots:
            slot.put(new)
        return FlatParameter(entry, slots, cast(ShardedTensor, new), stretches)


def _device_of(parameter: torch.Tensor, group: ProcessGroup) -> torch.device:
    """Where a parameter is, if the group moves memory from there; else the device that this rank uses."""
    kind = device_for(parameter.device.type, group)
    return parameter.device if parameter.device.type == kind else rank_device(dist.get_rank(), kind)
