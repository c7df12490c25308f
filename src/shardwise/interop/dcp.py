"""Beside `torch.distributed.checkpoint`: what it cannot do with sharded tensors by itself.

Saving and loading need nothing of this: `dcp.save`, `dcp.load` and `dcp.async_save` take sharded tensors as they are.
Importing this module imports `torch.distributed.checkpoint`, and with it the old system.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import hf_storage
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwise.errors import CheckpointError
from shardwise.sharded_tensor import ShardedTensor

__all__ = ["HuggingFaceStorageWriter", "full_state_dict"]


def full_state_dict(state: Any) -> Any:
    """A copy of a nested state in which every sharded tensor is whole. Every rank calls it, and gets all of it.

    Without the drop-in, `get_model_state_dict` with ``full_state_dict=True`` leaves sharded tensors as they are.
    """
    if isinstance(state, ShardedTensor):
        return state.full_tensor().detach()
    if isinstance(state, Mapping):
        return {key: full_state_dict(value) for key, value in state.items()}
    if isinstance(state, list | tuple) and not hasattr(state, "_fields"):
        return type(state)(full_state_dict(value) for value in state)
    return state.detach() if isinstance(state, torch.Tensor) else state


class HuggingFaceStorageWriter(hf_storage.HuggingFaceStorageWriter):
    """Torch's writer of safetensors, which also keeps all the shards of a rank that has several of one tensor.

    A file holds each name once, and torch's own writer gives each rank one file, so that only the last shard of a
    tensor stays. This one gives further shards files of their own, which torch's reader and its consolidation take as
    they take those of other ranks. Arguments are those of torch's; ``save_distributed=True`` is needed for shards.
    """

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Number each rank's files, and refuse shards of several ranks where all write into one file."""
        if not self.save_distributed and sum(bool(plan.items) for plan in plans) > 1:
            raise CheckpointError(
                "several ranks have something to write, and without save_distributed=True all would write into the "
                "same file: pass it, or save shardwise.interop.dcp.full_state_dict(state) on one rank"
            )
        prepared = super().prepare_global_plan(plans)
        return [replace(plan, storage_data={**plan.storage_data, "ranks": len(plans)}) for plan in prepared]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items, in as many rounds of files as a tensor has shards here."""
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
    """The items in rounds, so that a round has each tensor at most once."""
    rounds: list[list[WriteItem]] = []
    seen: Counter[str] = Counter()
    for item in items:
        number = seen[item.index.fqn]
        seen[item.index.fqn] += 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(item)
    return rounds
