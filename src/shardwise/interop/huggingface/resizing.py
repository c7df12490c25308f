"""Patches of transformers' `resize_token_embeddings` for sharded tables, which are never whole on any rank."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from shardwise.comm.agreement import in_step_sharing
from shardwise.comm.group import Fields
from shardwise.errors import PropertyError, ShardwiseError
from shardwise.layout.specs import ChunkShardingSpec
from shardwise.patching import Function, replace_when_loaded
from shardwise.tensor import ShardedTensor, shard_tensor

MODELS = "transformers.modeling_utils"
SPREAD = 1e-9  # the covariance of new rows, relative to that of the old ones; as in transformers


def _resize_embeddings(theirs: Function) -> Function:
    """`_get_resized_embeddings`, which resizes a sharded table in place."""

    @functools.wraps(theirs)
    def resize(
        self: Any,
        old_embeddings: Any,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> Any:
        weight = getattr(old_embeddings, "weight", None)
        if not isinstance(weight, ShardedTensor):
            return theirs(self, old_embeddings, new_num_tokens, pad_to_multiple_of, mean_resizing)
        count = weight.shape[0] if new_num_tokens is None and pad_to_multiple_of is not None else new_num_tokens
        if count is None:
            return old_embeddings
        if pad_to_multiple_of is not None:
            count = -(-count // pad_to_multiple_of) * pad_to_multiple_of
        _resize(self, weight, count, mean_resizing)
        old_embeddings.num_embeddings = count
        if old_embeddings.padding_idx is not None and old_embeddings.padding_idx >= count:
            old_embeddings.padding_idx = None
        return old_embeddings

    return resize


def _resize_head(theirs: Function) -> Function:
    """`_get_resized_lm_head`, which resizes a sharded head in place."""

    @functools.wraps(theirs)
    def resize(
        self: Any,
        old_lm_head: Any,
        new_num_tokens: int | None = None,
        transposed: bool = False,
        mean_resizing: bool = True,
    ) -> Any:
        weight = getattr(old_lm_head, "weight", None)
        if not isinstance(weight, ShardedTensor) or new_num_tokens is None:
            return theirs(self, old_lm_head, new_num_tokens, transposed, mean_resizing)
        if transposed:
            raise PropertyError(f"a head whose sharded weight has a word in each column is not resized: {weight!r}")
        _resize(self, weight, new_num_tokens, mean_resizing)
        old_lm_head.out_features = new_num_tokens
        bias = old_lm_head.bias
        if isinstance(bias, ShardedTensor):
            _resize(self, bias, new_num_tokens, mean_resizing)
        elif bias is not None and len(bias) != new_num_tokens:
            added = bias.detach().mean().expand(max(new_num_tokens - len(bias), 0))
            bias.data = torch.cat([bias.detach()[:new_num_tokens], added])
        return old_lm_head

    return resize


@torch.no_grad()
def _resize(model: Any, table: ShardedTensor, count: int, around_mean: bool) -> None:
    """Resize a table to ``count`` rows in place, with its own spec; new rows are random. Every rank calls this."""
    if table.shape[0] == count:
        return
    size, spec, group = torch.Size([count, *table.shape[1:]]), table.sharding_spec(), table._process_group

    def work() -> tuple[None, Fields, int]:
        try:
            spec.layout(size)
        except ShardwiseError as error:
            raise PropertyError(
                f"{type(spec).__name__} says nothing of size {tuple(size)}, of which the table is to be: "
                f"reshard the table by a rule first, such as a ChunkShardingSpec ({error})"
            ) from error
        return None, {"verb": "resize", "size": size}, int(torch.randint(2**62, ()).item())

    assert group is not None  # of a ShardedTensor
    _, seeds = in_step_sharing(group, work)
    kept: Any = table.detach()[:count]
    if count > table.shape[0]:
        generator = torch.Generator().manual_seed(seeds[0])
        added = count - table.shape[0]
        rows = _around_mean(table, added, generator) if around_mean else _as_initialised(model, table, added, seeds[0])
        places = list(dict.fromkeys(str(table._layout.place(row)) for row in range(len(table._layout))))
        new: Any = shard_tensor(rows, ChunkShardingSpec(0, places), process_group=group)
        kept = torch.cat([kept, new])
    table.data = kept.redistribute(spec)


def _around_mean(table: ShardedTensor, added: int, generator: torch.Generator) -> torch.Tensor:
    """New rows from the normal distribution with the mean of all rows and a fraction of their covariance."""
    values = table.detach().to(torch.promote_types(table.dtype, torch.float32))
    mean = values.mean(0, keepdim=True)
    parts = torch.randn(added, table.shape[0], generator=generator, dtype=values.dtype).to(table.device)
    centered = values - mean
    spread = parts @ centered if table.ndim > 1 else (parts * centered).sum(1)
    rows: Any = mean + spread * (SPREAD / table.shape[0]) ** 0.5
    whole: torch.Tensor = rows.full_tensor()
    return whole.to(table.dtype).contiguous()


def _as_initialised(model: Any, table: ShardedTensor, added: int, seed: int) -> torch.Tensor:
    """New rows, initialised by the model as those of an embedding."""
    fresh = nn.Embedding(added, max(table.shape[1:].numel(), 1), device=table.device, dtype=table.dtype)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model._init_weights(fresh)
    return fresh.weight.detach().reshape(added, *table.shape[1:])


replace_when_loaded(MODELS, "PreTrainedModel._get_resized_embeddings", _resize_embeddings)
replace_when_loaded(MODELS, "PreTrainedModel._get_resized_lm_head", _resize_head)
