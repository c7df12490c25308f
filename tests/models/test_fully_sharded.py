"""Models of transformers under `fully_shard`: loss and gradients of all ranks' samples are those of the plain model."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.models.twins import joined
from tests.models.zoo import SINGLE, ZOO, loss_of, made
from tests.nn.fully_sharded.cases import made as state_of
from tests.nn.fully_sharded.cases import whole

import shardwise
from shardwise.testing import ranks

LOCAL = ("GPT-2", "BERT", "T5", "CLIP", "Llama", "Mamba", "Whisper", "ViT")  # whose blocks treat samples one by one


@pytest.mark.parametrize("name", ZOO)
@ranks(2)
def test_models(name: str) -> None:
    """In steps on sharded and on local tensors. With their labels, some models round to float32 within."""
    plain = made(name).train()
    plain.config.use_cache = False
    model = shardwise.fully_shard(copy.deepcopy(plain), weights=[2, 1])
    inputs = ZOO[name].inputs()
    for _ in range(2):
        plain.zero_grad()
        model.zero_grad()
        expected = loss_of(plain, **inputs)
        expected.backward()
        loss = loss_of(model, **joined(inputs))
        loss.backward()
        torch.testing.assert_close(whole(loss), expected.detach(), rtol=SINGLE, atol=0)
        ours = dict(model.named_parameters())
        for key, parameter in plain.named_parameters():
            if parameter.grad is None:
                assert ours[key].grad is None or not whole(ours[key].grad).any()
            else:
                scale = parameter.grad.abs().max().item() + 1e-6  # the gradient of a bias of keys is 0
                torch.testing.assert_close(whole(ours[key].grad) / scale, parameter.grad / scale, rtol=0, atol=SINGLE)
    if name in LOCAL:
        assert all(None not in unit.local._known.values() for unit in state_of(model).units[1:])
