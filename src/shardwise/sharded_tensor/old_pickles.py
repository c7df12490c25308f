"""Pickles that the old system wrote: what they hold of a sharded tensor, put together and checked as ours are.

They name classes of `torch.distributed._shard`, so they come here only where the drop-in gives ours for them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.errors import PropertyError
from shardwise.layout import Layout
from shardwise.process_group import locate_all
from shardwise.sharded_tensor.assembly import rows_of
from shardwise.sharded_tensor.frame import Parts
from shardwise.sharded_tensor.pickling import checked_parts, group_as_saved
from shardwise.sharding_spec import ShardingSpec, infer_chunk_or_enumerable


@dataclass
class ProcessGroupState:
    """Where the process that wrote a pickle stood, in the group of the tensor and in the job."""

    local_rank: int
    global_rank: int
    local_world_size: int
    global_world_size: int


def restore(state: Any, device: torch.device) -> Parts:
    """The parts that the old system wrote, on the rank and in the group that wrote them. No communication.

    ``device`` is where `map_location` sends the tensor, which only counts on a rank that has no shards.
    """
    if not isinstance(state, tuple) or len(state) != 5:
        raise PropertyError(f"not a ShardedTensor as the old system pickles it: {type(state).__name__}")
    local_shards, metadata, saved, spec, _ = state
    try:
        group = group_as_saved({name.replace("_", " ").capitalize(): value for name, value in asdict(saved).items()})
        return _parts(local_shards, metadata, spec, torch.empty(0, device=device), group)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise PropertyError(f"a ShardedTensor pickled by the old system, with broken contents: {error!r}") from error


def _parts(local_shards: Any, metadata: Any, spec: Any, probe: torch.Tensor, group: ProcessGroup) -> Parts:
    records = metadata.shards_metadata
    layout = locate_all(Layout.from_metadata(records, metadata.size), group)
    if not isinstance(spec, ShardingSpec) or spec.layout(layout.size).order_of(layout) is None:
        spec = infer_chunk_or_enumerable(records)  # the old system did not look whether they agree
    rows = rows_of(local_shards, layout, list(layout.rows_on(dist.get_rank())))
    order = sorted(range(len(rows)), key=rows.__getitem__)
    held = {rows[k]: local_shards[k].tensor for k in order}
    # Nor whether the records are those of the shards; and what is read lies in ordinary memory.
    said = next(iter(held.values()), metadata.tensor_properties)
    return checked_parts(
        layout,
        spec,
        tuple(held),
        list(held.values()),
        probe,
        group,
        dtype=said.dtype,
        requires_grad=said.requires_grad,
        pin_memory=False,
    )
