"""A model of transformers in pieces does what its plain twin does: forward, backward, checkpoints, generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.interop.clients.models import same_gradients, token_ids, twins, whole

from shardwise import from_local
from shardwise.testing import ranks

IDS = token_ids()


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@ranks(2)
def test_a_step_is_that_of_the_twin(tied: bool, own: bool) -> None:
    """With the same ids on every rank, and with each rank's own, which are joined."""
    model, plain = twins(tied)
    ids = from_local(IDS.chunk(2)[dist.get_rank()]) if own else IDS
    mask = from_local(torch.ones_like(IDS).chunk(2)[dist.get_rank()]) if own else torch.ones_like(IDS)
    found = model(input_ids=ids, attention_mask=mask, labels=ids)
    expected = plain(input_ids=IDS, labels=IDS)
    torch.testing.assert_close(whole(found.logits), expected.logits.detach())
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)  # computed in float32
    found.loss.backward()
    expected.loss.backward()
    same_gradients(model, plain)


@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"use_reentrant": False}])
@ranks(2)
def test_layers_are_computed_again_in_the_backward(options: dict[str, Any]) -> None:
    """`gradient_checkpointing_enable` of both kinds, also with inputs that require grad."""
    model, plain = twins()
    for one in (model, plain):
        one.train()
        one.config.use_cache = False
        one.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        one.enable_input_require_grads()
        one(input_ids=IDS, labels=IDS).loss.backward()
    same_gradients(model, plain)


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"min_new_tokens": 4}, {"repetition_penalty": 1.5}])
@ranks(2)
def test_generated_words_are_those_of_the_twin(options: dict[str, Any]) -> None:
    """Greedily, from plain ids, with caches of keys and values and without."""
    model, plain = twins()
    found = model.generate(IDS, max_new_tokens=6, do_sample=False, **options)
    expected = plain.generate(IDS, max_new_tokens=6, do_sample=False, **options)
    assert torch.equal(whole(found), expected)
    assert found.tolist() == expected.tolist()


@ranks(2)
def test_sampled_words_are_those_of_the_twin() -> None:
    """From the same seed, though the logits are sharded."""
    model, plain = twins()
    options = {"max_new_tokens": 6, "do_sample": True, "top_k": 8, "temperature": 1.3}
    torch.manual_seed(4)
    expected = plain.generate(IDS, **options)
    torch.manual_seed(4)
    assert torch.equal(whole(model.generate(IDS, **options)), expected)


@ranks(2)
def test_generation_goes_on_after_padding() -> None:
    """Rows of different lengths, padded at the left; the mask says where they begin."""
    model, plain = twins()
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    ids[0, :2], mask[0, :2] = 0, 0
    found = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    expected = plain.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert torch.equal(whole(found), expected)
