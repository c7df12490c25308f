"""The attention that models of transformers call for sequences in pieces, by the name ``shardwise``.

Transformers makes no mask for it: causality, windows and documents are said to `shardwise.attention`.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.errors import UnsupportedOpError
from shardwise.nn.context_parallel.plan import IMPLEMENTATION
from shardwise.ops.attention import attention
from shardwise.patching import when_loaded


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    documents: Any = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The result as ``[sample, position, head, width]``, and no weights."""
    asked = [name for name in ("softcap", "position_bias", "s_aux", "cache") if others.get(name) is not None]
    if asked or attention_mask is not None:
        raise UnsupportedOpError(
            f"attention over sequences in pieces takes no {' and no '.join(asked) or 'mask'}: this model needs whole "
            "sequences, as with shardwise.fully_shard or plans.tensor_parallel"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    made = attention(
        query,
        key,
        value,
        causal=causal,
        window=sliding_window,
        documents=documents,
        dropout=dropout,
        scale=scaling,
    )
    return made.transpose(1, 2).contiguous(), None


def _register(modeling_utils: Any) -> None:
    interface = getattr(modeling_utils, "AttentionInterface", None)
    if interface is not None:
        interface.register(IMPLEMENTATION, attend)


when_loaded("transformers.modeling_utils", _register)
