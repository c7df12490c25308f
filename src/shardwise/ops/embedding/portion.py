"""Ids of an embedding that are one value: what of them this rank looks up, and the sharded tensor that comes of it.

Sharded ids are looked up where they lie. Of plain ids, the same on every rank, each rank takes a part. The result is
sharded as the ids are, with whole rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from shardwise.dispatch import Distributed
from shardwise.errors import ProcessGroupError, PropertyError
from shardwise.layout import Layout
from shardwise.ops.engine.chunking import chunked_layout
from shardwise.ops.engine.compute import assemble, frame_of, places_of
from shardwise.sharded_tensor import ShardedTensor
from shardwise.sharding_spec import spec_of
from shardwise.value_digest import digest


@dataclass(frozen=True, eq=False)
class Portion:
    """The boxes of the ids that this rank looks up, and how they lie on all ranks."""

    layout: Layout
    tensors: list[torch.Tensor]  # what fills this rank's boxes

    def counted(self) -> torch.Tensor | None:
        """Which ids count in frequencies: of boxes that lie on several ranks, those of the first; None: all."""
        if not self.layout.has_replicas:
            return None
        rows = self.layout.rows_on(dist.get_rank())
        marks = [torch.full_like(ids, self.layout.is_first(row)) for row, ids in zip(rows, self.tensors, strict=True)]
        return flat(marks, self.layout.some_device)


def flat(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The ids of all boxes, one behind another; none at all are on this device."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    if not tensors:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.cat([one.reshape(-1) for one in tensors])


def portion_of(ids: Any, weight: ShardedTensor, *, cut: Sequence[int] | None = None) -> Portion:
    """What this rank looks up of the ids, of which these dims may be cut, by default all of them.

    Ids that are cut along another dim move first; every rank of the group calls it.
    """
    allowed = range(ids.ndim) if cut is None else cut
    if isinstance(ids, ShardedTensor):
        require_together(ids, weight)
        if _cuts_others(ids._layout, allowed):
            ids = ids._redistributed(spec_of(dealt(ids.shape, weight, allowed)))
        return Portion(ids._layout, ids._local_tensors())
    if isinstance(ids, Distributed):
        raise PropertyError(f"the ids must be a plain or a sharded tensor, found {ids!r}")
    layout = dealt(ids.shape, weight, allowed)
    return Portion(layout, boxes_of(ids, layout))


def outlines(**operands: Any) -> dict[str, str]:
    """What all ranks must say alike of operands, by name. Of plain ones, the values too if they are quickly read."""
    said = {}
    for name, value in operands.items():
        if isinstance(value, ShardedTensor):
            said[name] = f"sharded {value._layout.outline} {value.dtype}"
        elif isinstance(value, torch.Tensor):
            name = f"plain {name} (what is each rank's own is said with shardwise.from_local)"
            said[name] = f"{tuple(value.shape)} {value.dtype} {digest(value)}".strip()
        elif value is not None:
            said[name] = type(value).__name__
    return said


def require_together(tensor: ShardedTensor, weight: ShardedTensor) -> None:
    """Raise unless an operand is on the table's group."""
    if tensor._process_group is not weight._process_group:
        raise ProcessGroupError(
            "All distributed tensors should use the same ProcessGroup if used together in an op, here a table and its "
            "ids: give from_local the process_group of the table"
        )


def boxes_of(plain: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """What this rank's boxes are of a plain tensor."""
    return [plain[layout.index(row)] for row in layout.rows_on(dist.get_rank())]


def dealt(size: Sequence[int], weight: ShardedTensor, allowed: Sequence[int]) -> Layout:
    """One dim in chunks over the ranks: the first that is long enough for all, else the longest. A number is on all."""
    places = places_of(weight._layout, weight._process_group)
    if not allowed:
        return Layout.whole(torch.Size(size), places)
    longest = max(allowed, key=lambda dim: size[dim])
    return chunked_layout(size, next((dim for dim in allowed if size[dim] >= len(places)), longest), weight)


def _cuts_others(layout: Layout, allowed: Sequence[int]) -> bool:
    """Whether a box has only a part of a dim that must be whole."""
    return any(layout.cuts(dim) for dim in range(layout.ndim) if dim not in allowed)


@lru_cache(maxsize=256)
def with_rows(layout: Layout, width: int) -> Layout:
    """The layout of the result: a row of this width for each id, or bag."""
    return layout.with_dim(layout.ndim, width)


def wrapped(layout: Layout, found: torch.Tensor, weight: ShardedTensor) -> Any:
    """The sharded tensor of rows that were found for this rank's boxes, one box behind another.

    A rank without boxes keeps what it found, which is nothing, in its graph: the backward is a collective.
    """
    frame = frame_of(with_rows(layout, weight.shape[1]), found.dtype, weight._process_group)
    boxes = layout.at(frame.rows)
    sizes, lengths = boxes.sizes.tolist(), boxes.volumes.tolist()
    parts = [found] if len(lengths) == 1 else torch.split_with_sizes(found, lengths) if lengths else ()
    tensors = [part.reshape(*size, weight.shape[1]) for part, size in zip(parts, sizes, strict=True)]
    return assemble(ShardedTensor, frame, tensors, [found], found.requires_grad)
