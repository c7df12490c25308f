"""A model of transformers in pieces does what its plain twin does: forward, backward, checkpoints."""

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
