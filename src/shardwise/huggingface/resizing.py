"""More or fewer words for a model of transformers whose embeddings are sharded: the table is never whole anywhere."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from shardwise.errors import PropertyError, ShardwiseError
from shardwise.interop.loading import Function, replace_when_loaded
from shardwise.process_group import Fields, in_step_sharing
from shardwise.sharded_tensor import ShardedTensor, shard_tensor
from shardwise.sharding_spec import ChunkShardingSpec

MODELS = "transformers.modeling_utils"
SPREAD = 1e-9  # of new rows around the mean of the old ones, in parts of their covariance: as transformers has it


def _embeddings_in_pieces(theirs: Function) -> Function:
    """`_get_resized_embeddings`, which gives a sharded table other rows where it is."""

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


def _head_in_pieces(theirs: Function) -> Function:
    """`_get_resized_lm_head`, likewise."""

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
    """Give a table so many rows, in place, by its own spec: the first stay, new ones are drawn. Every rank calls it."""
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
        drawn = torch.Generator().manual_seed(seeds[0])
        added = count - table.shape[0]
        rows = _around_mean(table, added, drawn) if around_mean else _as_initialised(model, table, added, seeds[0])
        places = list(dict.fromkeys(str(table._layout.place(row)) for row in range(len(table._layout))))
        new: Any = shard_tensor(rows, ChunkShardingSpec(0, places), process_group=group)
        kept = torch.cat([kept, new])
    table.data = kept.redistribute(spec)


def _around_mean(table: ShardedTensor, added: int, drawn: torch.Generator) -> torch.Tensor:
    """Rows from the normal distribution with the mean of all rows and a little of their covariance."""
    values = table.detach().to(torch.promote_types(table.dtype, torch.float32))
    mean = values.mean(0, keepdim=True)
    parts = torch.randn(added, table.shape[0], generator=drawn, dtype=values.dtype).to(table.device)
    centered = values - mean
    spread = parts @ centered if table.ndim > 1 else (parts * centered).sum(1)
    rows: Any = mean + spread * (SPREAD / table.shape[0]) ** 0.5
    whole: torch.Tensor = rows.full_tensor()
    return whole.to(table.dtype).contiguous()


def _as_initialised(model: Any, table: ShardedTensor, added: int, seed: int) -> torch.Tensor:
    """Rows as the model initialises those of an embedding."""
    fresh = nn.Embedding(added, max(table.shape[1:].numel(), 1), device=table.device, dtype=table.dtype)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model._init_weights(fresh)
    return fresh.weight.detach().reshape(added, *table.shape[1:])


replace_when_loaded(MODELS, "PreTrainedModel._get_resized_embeddings", _embeddings_in_pieces)
replace_when_loaded(MODELS, "PreTrainedModel._get_resized_lm_head", _head_in_pieces)
