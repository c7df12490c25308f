"""`TokenCut`: the tokens that this rank sends to experts, and the result in the form of what was given.

Sharded tokens are sent by the ranks that have them. Of tokens that several ranks have, plain ones among them, each rank
sends a part, and the results are put together again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise import settings
from shardwise.autograd.replicas import recorded
from shardwise.comm.group import group_ranks
from shardwise.errors import ProcessGroupError, PropertyError
from shardwise.layout import Layout
from shardwise.layout.geometry import Boxes
from shardwise.layout.specs import spec_of
from shardwise.ops.engine.chunking import group_chunks
from shardwise.ops.engine.compute import assemble, result_frame
from shardwise.ops.engine.plain_operand import cut_plain
from shardwise.tensor import ShardedTensor
from shardwise.tensor.dispatch import Distributed
from shardwise.tensor.movement import full_tensor


@lru_cache(maxsize=512)
def _without_last_dim(layout: Layout) -> Layout:
    """The layout of one element for each token, given that of tokens, which are whole."""
    boxes = layout.boxes
    return Layout.of(layout.size[:-1], Boxes(boxes.offsets[:, :-1], boxes.sizes[:, :-1]), layout.places)


@lru_cache(maxsize=512)
def _with_last_dim(layout: Layout, width: int) -> Layout:
    return layout.with_dim(layout.ndim, width)


@lru_cache(maxsize=512)
def _has_tokens_apart(layout: Layout) -> bool:
    """Whether each token lies whole on one rank."""
    return layout.ndim > 1 and not layout.cuts(layout.ndim - 1) and not layout.has_replicas


@dataclass(frozen=True, eq=False)
class TokenCut:
    """Where tokens lie while experts compute: by their layout, or each rank has its own plain ones."""

    group: ProcessGroup
    layout: Layout | None  # without the last dim; None of own plain tokens

    @staticmethod
    def of(hidden: Any, model: ShardedTensor) -> TokenCut:
        """That of these tokens, as they lie or in even chunks; ``model`` is a parameter of the experts."""
        group = model._process_group
        if not isinstance(hidden, Distributed):
            own = settings.current().own_batches
            return TokenCut(group, None if own else _without_last_dim(group_chunks(hidden.shape, 0, model)))
        if not isinstance(hidden, ShardedTensor):
            raise PropertyError(f"experts take plain or sharded tokens, found {type(hidden).__name__}")
        if hidden._process_group is not group:
            raise ProcessGroupError(
                "tokens and experts should use the same ProcessGroup: give it to expert_parallel and to from_local"
            )
        layout = hidden._layout if _has_tokens_apart(hidden._layout) else group_chunks(hidden.shape, 0, model)
        return TokenCut(group, _without_last_dim(layout))

    def rows(self, tensor: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's tokens of a tensor as rows, and an anchor for a rank without any. Every rank calls it."""
        width = tensor.shape[-1]
        if self.layout is None:
            return tensor.reshape(-1, width), None
        layout, anchor = _with_last_dim(self.layout, width), None
        if isinstance(tensor, ShardedTensor):
            placed = tensor if tensor._layout == layout else tensor._redistributed(spec_of(layout))
            parts, anchor = recorded(placed)
        elif torch.is_grad_enabled() and tensor.requires_grad:
            *parts, anchor = cut_plain(tensor, layout, self.group)
        else:
            parts = [tensor[layout.index(row)] for row in layout.rows_on(dist.get_rank())]
        if not parts:
            return torch.empty(0, width, dtype=tensor.dtype, device=tensor.device), anchor
        rows = [part if part.ndim == 2 else part.reshape(-1, width) for part in parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows), anchor

    def tokens_of_each(self, own: int) -> Sequence[int]:
        """How many each member has; of own tokens, as many as this one."""
        if self.layout is None:
            return [own] * self.group.size()
        by_rank = self.layout.elements_by_rank()
        return [by_rank.get(rank, 0) for rank in group_ranks(self.group)]

    def wrapped(self, rows: torch.Tensor, anchor: torch.Tensor | None, like: Any) -> Any:
        """A row for each token of this rank as a tensor that lies as ``like`` does. Every rank calls it."""
        if self.layout is None:
            return rows.view(like.shape)
        frame = result_frame(_with_last_dim(self.layout, rows.shape[1]), rows.dtype, self.group)
        sizes = [frame.layout.extent(row) for row in frame.rows]
        lengths = [math.prod(size[:-1]) for size in sizes]
        parts = [rows] if len(lengths) == 1 else torch.split_with_sizes(rows, lengths) if lengths else ()
        tensors = [
            part if part.ndim == len(size) else part.reshape(size) for part, size in zip(parts, sizes, strict=True)
        ]
        anchors = [rows] if anchor is None else [rows, anchor]
        made = assemble(ShardedTensor, frame, tensors, anchors, anchor is not None)
        assert isinstance(made, ShardedTensor)
        if not isinstance(like, ShardedTensor):
            return full_tensor(made, in_op=True)
        return made if made._layout == like._layout else made._redistributed(spec_of(like._layout))
