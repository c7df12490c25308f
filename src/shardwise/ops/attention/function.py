"""`attention`: with windows and documents that are said, and never laid out as a mask of all queries and keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import handle_torch_function, has_torch_function

from shardwise.errors import PropertyError, UnsupportedOpError
from shardwise.ops.attention.documents import Documents
from shardwise.ops.attention.ops import attend_in_pieces, plan_in_pieces
from shardwise.ops.attention.visibility import Visibility
from shardwise.ops.engine.call_cache import cached_handler
from shardwise.ops.engine.compute import summary_of
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import registry


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    documents: Documents | Sequence[int] | Sequence[Sequence[int]] | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    """Scaled dot product attention over queries, keys and values of samples, heads, positions and width.

    With ``causal``, a query sees keys up to its own position; with a ``window``, only keys less than so many positions
    away; with ``documents``, the positions at which documents begin in the packed sequence (one list, or one for each
    sample), only keys of its own document. There may be fewer heads of keys than of queries, if they divide these. With
    ``dropout``, weights are dropped with this probability, the same ones wherever the sequence is cut.

    The sequence of sharded tensors may be cut anywhere. Queries stay where they are, and only keys and values that they
    see come to them; no tensor of all queries and keys is ever made. Every rank of the group calls it::

        >>> q, k, v = (shardwise.shard(torch.randn(1, 2, 10, 8), 2, src=0) for _ in range(3))
        >>> shardwise.attention(q, k, v, causal=True, window=4, documents=[0, 7]).shape
        torch.Size([1, 2, 10, 8])
    """
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise PropertyError(f"window is how many positions a query sees, at least 1; found {window!r:.80}")
    said = None if documents is None else Documents.of(documents)
    groups = query.ndim == key.ndim == 4 and query.shape[1] != key.shape[1]
    if said is None and (window is None or window >= max(query.shape[-2], key.shape[-2])):
        return scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=groups
        )
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        raise PropertyError("with a window or documents, tensors have dims of samples, heads, positions and width")
    made: torch.Tensor = _attention(query, key, value, causal, window, said, dropout, scale)
    return made


class _Attention:
    """The function that handlers know: with a window or with documents."""

    __name__ = "attention"

    def __call__(self, query: Any, key: Any, value: Any, *options: Any) -> Any:
        operands = query, key, value
        if has_torch_function(operands):
            return handle_torch_function(self, operands, *operands, *options)
        return _masked(query, key, value, *options)


_attention = _Attention()


def _visibilities(samples: int, causal: bool, window: int | None, said: Documents | None) -> tuple[Visibility, ...]:
    before = None if window is None else window - 1
    begins: Sequence[tuple[int, ...] | None] = [None] if said is None else said.by_sample(samples)
    return tuple(Visibility(before, 0 if causal else before, one) for one in begins)


def _in_pieces(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Of sharded tensors."""
    query, key, value, causal, window, said, dropout, scale = args
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (one if one.dtype == torch.float64 else one.to(dtype) for one in (query, key, value))
    plan = plan_in_pieces(query, key, value, None, _visibilities(query.shape[0], causal, window, said))
    if plan is None:
        return _masked(query, key, value, causal, window, said, dropout, scale)
    operands = {f"operand {k}": f"{one._layout.outline} {one.dtype}" for k, one in enumerate((query, key, value))}
    options = {"causal": causal, "window": window, "documents": said, "dropout": dropout, "scale": scale}
    summary = summary_of({"op": "attention", **options, **operands})
    return attend_in_pieces(plan, query, key, value, None, scale, summary, dropout)


MOST_MASKED = 1 << 26  # elements of a mask that is laid out


def _masked(
    query: Any,
    key: Any,
    value: Any,
    causal: bool,
    window: int | None,
    said: Documents | None,
    dropout: float,
    scale: float | None,
) -> Any:
    """Of plain tensors, and of sharded ones whose heads are cut otherwise: with a mask."""
    size = query.shape[-2], key.shape[-2]
    sharded = any(isinstance(one, ShardedTensorBase) for one in (query, key, value))
    if sharded and math.prod(size) > MOST_MASKED:
        raise UnsupportedOpError(
            f"attention of {size[0]} queries over {size[1]} keys would need a mask of all of them where queries, keys "
            "and values are not all sharded over one group, or a group of heads is cut apart: shard all three"
        )
    device = torch.device("cpu") if query.is_meta else query.device
    places = [torch.arange(n, device=device) for n in size]
    distance = places[1] - places[0].unsqueeze(1)
    masks = []
    for rule in _visibilities(query.shape[0], causal, window, said):
        seen = torch.ones(size, dtype=torch.bool, device=device)
        if rule.before is not None:
            seen &= distance >= -rule.before
        if rule.behind is not None:
            seen &= distance <= rule.behind
        if rule.documents is not None:
            begins = torch.tensor(rule.documents, device=device)
            numbers = [torch.bucketize(one, begins, right=True) for one in places]
            seen &= numbers[0].unsqueeze(1) == numbers[1]
        masks.append(seen)
    mask = torch.stack(masks).unsqueeze(1)
    groups = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=groups
    )


registry.built_in[_attention] = cached_handler(_attention, _in_pieces)
