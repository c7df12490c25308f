"""Additions to `torch.distributed.checkpoint` for sharded tensors.

`dcp.save`, `dcp.load` and `dcp.async_save` take sharded tensors without this module. Importing it imports
`torch.distributed.checkpoint`, and with it the old system.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import hf_storage
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from shardwise.comm.agreement import in_step
from shardwise.comm.group import Fields, or_default
from shardwise.errors import CheckpointError
from shardwise.tensor import ShardedTensor

__all__ = ["HuggingFaceStorageWriter", "full_state_dict"]


def full_state_dict(state: Any, *, cpu_offload: bool = False, process_group: ProcessGroup | None = None) -> Any:
    """The same nested state with every sharded tensor and DTensor whole; other tensors are those that are given.

    Every rank of the group calls it, with the same keys, and gets all of it. With ``cpu_offload``, only the first rank
    does, in the memory of its CPU, and all others get an empty dict, as with torch's option of this name::

        full_state_dict(model.state_dict(), cpu_offload=True)

    `get_model_state_dict` with ``full_state_dict=True`` leaves sharded tensors as they are without the drop-in.
    """
    group = or_default(process_group)
    found = sorted(_distributed_in(state, ()), key=lambda item: item[0])

    def work() -> tuple[None, Fields]:
        return None, {"verb": "full_state_dict", "cpu_offload": cpu_offload, "keys": [name for name, _ in found]}

    in_step(group, work)
    keeps = not cpu_offload or dist.get_rank(group) == 0
    whole: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for _, tensor in found:
            gathered = tensor.full_tensor().detach()
            if keeps:
                whole[id(tensor)] = gathered.cpu() if cpu_offload else gathered
    return _replaced(state, whole, cpu_offload) if keeps else {}


def _distributed_in(state: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Each sharded tensor and DTensor with its path."""
    if isinstance(state, ShardedTensor | DTensor):
        yield "/".join(path), state
    elif isinstance(state, Mapping | list | tuple):
        for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from _distributed_in(value, (*path, str(key)))


def _replaced(state: Any, whole: dict[int, torch.Tensor], cpu_offload: bool) -> Any:
    """The state with whole tensors in the place of distributed ones; containers keep their types."""
    if isinstance(state, torch.Tensor):
        plain = whole.get(id(state), state).detach()
        return plain.cpu() if cpu_offload else plain
    if isinstance(state, MutableMapping):
        made = copy.copy(state)  # keeps its attributes, such as a module's versions
        made.update({key: _replaced(value, whole, cpu_offload) for key, value in state.items()})
        return made
    if isinstance(state, list | tuple):
        values = [_replaced(value, whole, cpu_offload) for value in state]
        return type(state)(*values) if hasattr(state, "_fields") else type(state)(values)
    return state


class HuggingFaceStorageWriter(hf_storage.HuggingFaceStorageWriter):
    """Torch's writer of safetensors, which also keeps all the shards of a rank that has several of one tensor.

    A file holds each name once, and torch's own writer gives each rank one file, so that only the last shard of a
    tensor stays. This one gives further shards files of their own, which torch's reader and its consolidation take as
    they take those of other ranks. Arguments are those of torch's; ``save_distributed=True`` is needed for shards.
    """

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Number the files of each rank; refuse several writers without ``save_distributed``."""
        if not self.save_distributed and sum(bool(plan.items) for plan in plans) > 1:
            raise CheckpointError(
                "several ranks have something to write, and without save_distributed=True all would write into the "
                "same file: pass it, or save shardwise.interop.dcp.full_state_dict(state) on one rank"
            )
        prepared = super().prepare_global_plan(plans)
        return [replace(plan, storage_data={**plan.storage_data, "ranks": len(plans)}) for plan in prepared]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items, in as many files as a tensor has local shards."""
        results: list[WriteResult] = []
        for number, items in enumerate(_each_name_once(plan.items)):
            data = dict(plan.storage_data)
            if number and not self.save_distributed:
                name = items[0].index.fqn
                raise CheckpointError(f"'{name}' has several shards on this rank: they need save_distributed=True")
            if "shard_index" in data:
                data["shard_index"] += number * data["ranks"]
            results += super().write_data(replace(plan, items=items, storage_data=data), planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _each_name_once(items: list[WriteItem]) -> list[list[WriteItem]]:
    """The items in lists that have each tensor at most once."""
    rounds: list[list[WriteItem]] = []
    seen: Counter[str] = Counter()
    for item in items:
        number = seen[item.index.fqn]
        seen[item.index.fqn] += 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(item)
    return rounds
