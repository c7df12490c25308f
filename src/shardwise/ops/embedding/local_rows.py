"""`look_up_locally`: rows of a table that lies whole on every rank that has ids: each rank looks up its own ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from shardwise.autograd.anchors import wants_graph
from shardwise.layout import Layout
from shardwise.ops.embedding.lookup import LookupOptions
from shardwise.ops.embedding.portion import with_rows
from shardwise.ops.engine.compute import assemble, result_frame
from shardwise.ops.engine.recorder import use_in_place
from shardwise.tensor import ShardedTensor


def is_local(ids: Any, weight: ShardedTensor, options: LookupOptions) -> bool:
    """Whether every rank has all rows for its ids. From layouts alone: all ranks decide alike."""
    if options.max_norm is not None or options.scale_grad_by_freq or options.sparse or weight.is_meta:
        return False
    if not isinstance(ids, ShardedTensor) or ids._process_group is not weight._process_group:
        return False
    return ids.dtype in (torch.int32, torch.int64) and _is_whole_for(weight._layout, ids._layout)


@lru_cache(maxsize=256)
def _is_whole_for(table: Layout, ids: Layout) -> bool:
    """Whether each rank of the ids has one table, whole, on the device of the ids."""
    if table.ndim != 2 or not table.is_whole_everywhere or not table.size.numel():
        return False
    ranks = table.ranks.tolist()
    kinds = table.places.device_types | ids.places.device_types
    return len(kinds) == 1 and len(set(ranks)) == len(ranks) and set(ids.ranks.tolist()) <= set(ranks)


def look_up_locally(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A row for each id, on the rank of the id. Called by the cache of calls; nothing is sent."""
    ids, weight, padding = args
    records, rank = wants_graph(weight), dist.get_rank()
    tensors = use_in_place(weight) if weight._layout.has_replicas else weight._local_tensors()
    layout = with_rows(ids._layout, weight.shape[1])
    rows = [torch.embedding(tensors[0], local, -1 if padding is None else padding) for local in ids._local_tensors()]
    anchors = [] if layout.rows_on(rank) else [tensor.reshape(-1)[:0].sum() for tensor in tensors[:1] if records]
    return assemble(ShardedTensor, result_frame(layout, weight.dtype, weight._process_group), rows, anchors, records)
