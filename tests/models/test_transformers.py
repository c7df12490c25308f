"""Whole models of transformers: sharded in every way, each trains as its plain twin."""

from __future__ import annotations

import pytest
from tests.models.plans import columns, planned, rows, tensor_parallel, uneven
from tests.models.twins import assert_trains_alike, joined, sharded
from tests.models.zoo import ZOO, loss_of, made

import shardwise
from shardwise.testing import ranks


@pytest.mark.parametrize("name", ZOO)
@ranks(2)
def test_a_model_trains_as_its_twin(name: str) -> None:
    """Loss and every gradient, from plain inputs and from a batch of each rank's own, however it is cut."""
    plain, inputs, tolerance = made(name), ZOO[name].inputs(), ZOO[name].tolerance
    for cut, given in ((uneven, inputs), (columns, joined(inputs))):
        assert_trains_alike(sharded(plain, cut), plain, given, inputs, loss_of, tolerance)


@pytest.mark.parametrize("name", ["GPT-2", "T5", "Llama", "CLIP"])
@ranks(4)
def test_on_four_ranks(name: str) -> None:
    """Heads are cut, and some ranks hold nothing of a parameter."""
    plain, inputs, tolerance = made(name), ZOO[name].inputs(), ZOO[name].tolerance
    for cut, given in ((tensor_parallel(name), inputs), (uneven, joined(inputs))):
        assert_trains_alike(sharded(plain, cut), plain, given, inputs, loss_of, tolerance)


@pytest.mark.parametrize("name", ZOO)
@ranks(2)
def test_nothing_is_gathered_for_a_model(name: str) -> None:
    """At a gather budget of zero, as it must be for models of real size."""
    plain, inputs, tolerance = made(name), ZOO[name].inputs(), ZOO[name].tolerance
    with shardwise.gather_budget(0):
        for cut, given in ((rows, inputs), (planned(plain), joined(inputs))):
            assert_trains_alike(sharded(plain, cut), plain, given, inputs, loss_of, tolerance)


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
@ranks(2)
def test_reentrant_checkpoints_of_a_model(name: str) -> None:
    """What is computed again in the backward lies as ranks' own samples do, and takes gradients that lie elsewhere."""
    plain, inputs, tolerance = made(name), ZOO[name].inputs(), ZOO[name].tolerance
    plain.config.use_cache = False
    twin = sharded(plain, tensor_parallel(name))
    for model in (plain, twin):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": True})
    assert_trains_alike(twin, plain, joined(inputs), inputs, loss_of, tolerance)
