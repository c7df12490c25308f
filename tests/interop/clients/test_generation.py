"""`generate` of transformers: a model in pieces gives the words of its plain twin, as a plain tensor on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.interop.clients.models import llama, token_ids, twins
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

import shardwise
from shardwise import ShardedTensor, from_local, plans, shard_module
from shardwise.testing import ranks

IDS = token_ids()
CUTS: dict[str, Callable[[nn.Module], Any]] = {
    "tensor_parallel": lambda model: shard_module(model, plans.tensor_parallel(model)),
    "rows": lambda model: shard_module(model, plans.rows(model)),
    "fully_sharded": lambda model: shard_module(model, plans.fully_sharded(model)),
    "fully_shard": shardwise.fully_shard,
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "without cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "at least": {"min_new_tokens": 4},
    "no repetition": {"repetition_penalty": 1.5},
    "sampled": {"do_sample": True, "top_k": 8, "temperature": 1.3},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "looked up in the prompt": {"prompt_lookup_num_tokens": 2},
}
LENGTH = {"max_new_tokens": 5}


def assert_same_words(found: Any, expected: torch.Tensor) -> None:
    """Plain, and what the plain model says; and so the same on every rank."""
    assert type(found) is torch.Tensor
    assert found.numpy().tolist() == expected.tolist()


def generated(model: Any, ids: Any, **options: Any) -> Any:
    """From one seed, so that what is sampled can be compared."""
    torch.manual_seed(4)
    return model.generate(ids, **{"do_sample": False, **LENGTH, **options})


@pytest.mark.parametrize("cut", CUTS)
@ranks(2)
def test_words_are_those_of_the_plain_model(cut: str) -> None:
    """However the model is cut, and however words are chosen; what is sampled is drawn from the same seed."""
    plain = llama()
    model = CUTS[cut](copy.deepcopy(plain))
    for mode, options in MODES.items():
        ids = IDS[:1] if "looked" in mode else IDS  # transformers looks up for one row only
        found, expected = generated(model, ids, **options), generated(plain, ids, **options)
        assert found.tolist() == expected.tolist(), mode
        assert_same_words(found, expected)


@pytest.mark.parametrize("cut", CUTS)
@ranks(2)
def test_generation_goes_on_after_padding(cut: str) -> None:
    """Rows of different lengths, padded at the left; the mask says where they begin."""
    plain = llama()
    model = CUTS[cut](copy.deepcopy(plain))
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    ids[0, :2], mask[0, :2] = 0, 0
    for options in ({}, {"num_beams": 2}):
        expected = generated(plain, ids, attention_mask=mask, **options)
        assert_same_words(generated(model, ids, attention_mask=mask, **options), expected)


@ranks(2)
def test_each_ranks_own_prompts_give_the_words_of_all() -> None:
    """Prompts that are joined by `from_local`: every rank gets the words of all of them."""
    model, plain = twins()
    ids, mask = (from_local(one.chunk(2)[dist.get_rank()]) for one in (IDS, torch.ones_like(IDS)))
    found = generated(model, ids, attention_mask=mask)
    assert_same_words(found, generated(plain, IDS, attention_mask=torch.ones_like(IDS)))


@ranks(2)
def test_what_is_returned_beside_the_words() -> None:
    """Scores and logits are plain, a cache of keys and values stays sharded, in one layout."""
    model, plain = twins()
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    found, expected = generated(model, IDS, **options), generated(plain, IDS, **options)
    assert_same_words(found.sequences, expected.sequences)
    for name in ("scores", "logits"):
        for one, other in zip(found[name], expected[name], strict=True):
            assert type(one) is torch.Tensor
            torch.testing.assert_close(one, other)
    keys = [layer.keys for layer in found.past_key_values.layers]
    assert all(isinstance(one, ShardedTensor) for one in keys)
    assert all(one.sharding_spec() == keys[0].sharding_spec() for one in keys)
    assert len(keys[0].metadata().shards_metadata) == 2


def traced(model: Any, count: int) -> Any:
    """The trace of so many words, the second time that they are generated."""
    generated(model, IDS, max_new_tokens=count)
    with shardwise.trace() as trace:
        generated(model, IDS, max_new_tokens=count)
    return trace


@ranks(2)
def test_a_word_takes_few_messages() -> None:
    """Two for the table and two for each layer, whose sums go to every rank, and one for the logits; nothing is worked
    out anew, and ranks do not meet."""
    model, plain = CUTS["tensor_parallel"](llama()), llama()
    three, four = traced(model, 3), traced(model, 4)
    assert len(four.events) - len(three.events) == 2 + 2 * plain.config.num_hidden_layers + 1
    assert not any(event.is_meeting for event in four.events)
    assert not four.uncached


@ranks(2)
def test_a_model_with_an_encoder_generates() -> None:
    """T5, whose encoder runs once, and whose decoder keeps two caches."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=32, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **sizes)
    plain = T5ForConditionalGeneration(config).double().eval()
    model = CUTS["tensor_parallel"](copy.deepcopy(plain))
    for options in ({}, {"num_beams": 2}):
        assert_same_words(generated(model, IDS, **options), generated(plain, IDS, **options))


@ranks(2)
def test_a_forward_after_generation_is_sharded_as_before() -> None:
    """The logits are plain for `generate` only, also after it has raised."""
    model, _ = twins()
    generated(model, IDS)
    with pytest.raises(ValueError, match="max_new_tokens"):
        generated(model, IDS, max_new_tokens=0)
    assert isinstance(model(input_ids=IDS).logits, ShardedTensor)
