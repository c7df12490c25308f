"""`Portion`: the ids that this rank looks up, and the sharded result.

Sharded ids are looked up on their ranks. Of plain ids, the same on every rank, each rank takes a part. The result has
the sharding of the ids, with whole rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.value_digest import digest
from shardwise.errors import ProcessGroupError, PropertyError
from shardwise.layout import Layout
from shardwise.layout.specs import spec_of
from shardwise.ops.engine.chunking import group_chunks
from shardwise.ops.engine.compute import assemble, group_places, result_frame
from shardwise.tensor import ShardedTensor
from shardwise.tensor.dispatch import Distributed


@dataclass(frozen=True, eq=False)
class Portion:
    """The ids that this rank looks up, and the layout of all ids."""

    layout: Layout
    tensors: list[torch.Tensor]  # of this rank's boxes

    def counted(self) -> torch.Tensor | None:
        """Which ids count in frequencies: of replicas the first; None: all."""
        if not self.layout.has_replicas:
            return None
        rows = self.layout.rows_on(dist.get_rank())
        marks = [torch.full_like(ids, self.layout.is_first(row)) for row, ids in zip(rows, self.tensors, strict=True)]
        return concat_ids(marks, self.layout.some_device)


def concat_ids(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The ids of all boxes, concatenated; an empty tensor is on this device."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    if not tensors:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.cat([one.reshape(-1) for one in tensors])


def local_portion(ids: Any, weight: ShardedTensor, *, cut: Sequence[int] | None = None) -> Portion:
    """The portion of the ids for this rank; only the dims ``cut`` may be cut, by default all.

    Ids that are cut along another dim are redistributed first. Every rank of the group calls it.
    """
    allowed = range(ids.ndim) if cut is None else cut
    if isinstance(ids, ShardedTensor):
        require_same_group(ids, weight)
        if _cuts_whole_dim(ids._layout, allowed):
            ids = ids._redistributed(spec_of(chunk_ids(ids.shape, weight, allowed)))
        return Portion(ids._layout, ids._local_tensors())
    if isinstance(ids, Distributed):
        raise PropertyError(f"the ids must be a plain or a sharded tensor, found {ids!r}")
    layout = chunk_ids(ids.shape, weight, allowed)
    return Portion(layout, local_boxes(ids, layout))


def operand_summaries(**operands: Any) -> dict[str, str]:
    """What ranks compare of operands, by name; of plain ones the values, too, if they are quickly read."""
    summaries = {}
    for name, value in operands.items():
        if isinstance(value, ShardedTensor):
            summaries[name] = f"sharded {value._layout.outline} {value.dtype}"
        elif isinstance(value, torch.Tensor):
            summaries[plain_field(name)] = f"{tuple(value.shape)} {value.dtype} {digest(value)}".strip()
        elif value is not None:
            summaries[name] = type(value).__name__
    return summaries


def plain_field(name: str) -> str:
    """The name under which ranks compare a plain operand."""
    return f"plain {name} (what is each rank's own is said with shardwise.from_local)"


def require_same_group(tensor: ShardedTensor, weight: ShardedTensor) -> None:
    """Raise unless an operand is on the table's group."""
    if tensor._process_group is not weight._process_group:
        raise ProcessGroupError(
            "All distributed tensors should use the same ProcessGroup if used together in an op, here a table and its "
            "ids: give from_local the process_group of the table"
        )


def local_boxes(plain: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """This rank's boxes of a plain tensor."""
    return [plain[layout.index(row)] for row in layout.rows_on(dist.get_rank())]


def chunk_ids(size: Sequence[int], weight: ShardedTensor, allowed: Sequence[int]) -> Layout:
    """One dim in chunks: the first with an element for each rank, else the longest. A single id is on every rank."""
    places = group_places(weight._layout, weight._process_group)
    if not allowed:
        return Layout.whole(torch.Size(size), places)
    longest = max(allowed, key=lambda dim: size[dim])
    return group_chunks(size, next((dim for dim in allowed if size[dim] >= len(places)), longest), weight)


def _cuts_whole_dim(layout: Layout, allowed: Sequence[int]) -> bool:
    """Whether a dim that must be whole is cut."""
    return any(layout.cuts(dim) for dim in range(layout.ndim) if dim not in allowed)


@lru_cache(maxsize=256)
def with_rows(layout: Layout, width: int) -> Layout:
    """The layout of a row of this width for each id or bag."""
    return layout.with_dim(layout.ndim, width)


def wrap_rows(layout: Layout, rows: torch.Tensor, weight: ShardedTensor) -> Any:
    """The sharded tensor of the rows of this rank's boxes, concatenated.

    A rank without boxes keeps the empty tensor in its graph: the backward is a collective.
    """
    frame = result_frame(with_rows(layout, weight.shape[1]), rows.dtype, weight._process_group)
    boxes = layout.at(frame.rows)
    sizes, lengths = boxes.sizes.tolist(), boxes.volumes.tolist()
    parts = [rows] if len(lengths) == 1 else torch.split_with_sizes(rows, lengths) if lengths else ()
    tensors = [part.reshape(*size, weight.shape[1]) for part, size in zip(parts, sizes, strict=True)]
    return assemble(ShardedTensor, frame, tensors, [rows], rows.requires_grad)
