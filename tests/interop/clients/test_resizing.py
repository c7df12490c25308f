"""`resize_token_embeddings` of models whose tables are sharded: the exact size, the old rows, the same kind of spec."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cases import boxes
from tests.interop.clients.models import ROWS, llama, sharded, twins, whole

from shardwise import ShardedTensor
from shardwise.nn import shard_parameter
from shardwise.testing import ranks


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("count", "mean"), [(41, True), (41, False), (19, True), (1, True), (32, True)])
@ranks(2)
def test_a_sharded_table_gets_more_or_fewer_rows(tied: bool, count: int, mean: bool) -> None:
    """What stays has its values, what is new is the same for all ranks; an optimizer goes on with the same objects."""
    model, plain = twins(tied)
    tables = [model.model.embed_tokens.weight, model.lm_head.weight]
    assert model.resize_token_embeddings(count, mean_resizing=mean) is model.model.embed_tokens
    plain.resize_token_embeddings(count, mean_resizing=mean)
    assert model.config.vocab_size == model.vocab_size == count
    assert (model.model.embed_tokens.num_embeddings, model.lm_head.out_features) == (count, count)
    assert model.model.embed_tokens.padding_idx == plain.model.embed_tokens.padding_idx
    for found, before, twin in zip(
        (model.model.embed_tokens.weight, model.lm_head.weight),
        tables,
        (plain.model.embed_tokens.weight, plain.lm_head.weight),
        strict=True,
    ):
        assert found is before
        assert (type(found).__name__, found.requires_grad) == ("ShardedTensor", True)
        assert (found.shape, found.sharding_spec()) == ((count, 16), ROWS)
        assert found._layout == ROWS.layout((count, 16))
        assert torch.Tensor.size(found) == found.shape
        kept = min(count, 32)
        assert torch.equal(whole(found)[:kept], twin.detach()[:kept])
        if count > 32 and mean:  # both draw around the mean, with a spread of about 3e-5 of that of the rows
            torch.testing.assert_close(whole(found)[32:], twin.detach()[32:], rtol=0, atol=1e-5)
        elif count > 32:
            assert 0.01 < whole(found)[32:].std() < 0.03  # config.initializer_range is 0.02
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@ranks(2)
def test_rows_are_padded_to_a_multiple() -> None:
    """As transformers counts them."""
    model, plain = twins(tied=True)
    model.resize_token_embeddings(33, pad_to_multiple_of=8)
    plain.resize_token_embeddings(33, pad_to_multiple_of=8)
    assert model.lm_head.weight.shape == plain.lm_head.weight.shape == (40, 16)


@ranks(2)
def test_boxes_for_one_size_are_refused() -> None:
    """One line on every rank, and the model is as it was."""
    model: Any = sharded(llama())
    shard_parameter(model, "model.embed_tokens.weight", boxes(([0, 0], [20, 16], 0), ([20, 0], [12, 16], 1)))
    with pytest.raises(ValueError, match=r"nothing of size \(40, 16\).*: reshard the table by a rule first"):
        model.resize_token_embeddings(40)
    assert isinstance(model.model.embed_tokens.weight, ShardedTensor)
    assert model.model.embed_tokens.weight.shape == (32, 16)
