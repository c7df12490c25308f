"""Tiny transformers, tensor parallel on two gloo ranks: what a step costs the processor of a rank, beside a plain one.

The tensors are so small that this is the cost of the calls: `python -m benchmarks.models`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

import shardwise
from benchmarks.table import Row, show
from benchmarks.timing import Work, least_processor_time
from shardwise import plans
from shardwise.testing import run_on_ranks

WARM_UP, STEPS = 5, 20
MOST = 2.5  # times the plain step
BATCH, LENGTH, WORDS = 4, 16, 128
SIZES: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
DECODER: dict[str, Any] = {"vocab_size": WORDS, "max_position_embeddings": LENGTH, "num_key_value_heads": 2, **SIZES}


def _gpt2() -> nn.Module:
    sizes: dict[str, Any] = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=WORDS, **sizes))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)),
    "gpt2": _gpt2,
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **SIZES)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=4, **DECODER)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(head_dim=8, **DECODER)),
}


def step_of(make: Callable[[], nn.Module], *, shards: bool) -> Work:
    """Forward, loss, backward and SGD."""
    torch.manual_seed(0)
    model = make().train()
    if shards:
        model = shardwise.shard_module(model, plans.tensor_parallel(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ids = torch.randint(3, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))

    def step() -> None:
        optimizer.zero_grad()
        loss: Any = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()

    return step


def measure() -> list[Row]:
    """On each rank: the least processor time of some steps, in which the contenders take turns."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for name, make in MODELS.items():
        steps = {"shardwise": step_of(make, shards=True), "plain": step_of(make, shards=False)}
        best = least_processor_time(steps, warm_up=WARM_UP, steps=STEPS)
        rows.append(Row(f"{name}, tensor parallel", best, f"≤ {MOST} plain", ("plain", MOST)))
    return rows


def main() -> None:
    show(
        "Processor time of a step of tiny transformers on 2 ranks", run_on_ranks(2, measure, timeout=600, fresh=True)[0]
    )


if __name__ == "__main__":
    from benchmarks import models  # as the ranks import it

    models.main()
