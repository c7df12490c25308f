"""A word of transformers' `generate` on two gloo ranks: processor time of a rank beside a plain model.

The model is so small that this is the cost of the calls: `python -m benchmarks.generation`.
"""

from __future__ import annotations

import copy
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

NEW_WORDS, WARM_UP, CALLS = 20, 2, 7
MOST = 3  # times the plain model's
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
PLANS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plans.tensor_parallel": lambda model: shardwise.shard_module(model, plans.tensor_parallel(model)),
    "plans.rows": lambda model: shardwise.shard_module(model, plans.rows(model)),
    "plans.fully_sharded": lambda model: shardwise.shard_module(model, plans.fully_sharded(model)),
    "fully_shard": shardwise.fully_shard,
}


def words_of(model: Any) -> Work:
    """Some words behind two prompts."""
    ids = torch.randint(1, 128, (2, 6), generator=torch.Generator().manual_seed(1))
    options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "max_new_tokens": NEW_WORDS}
    return lambda: model.generate(ids, do_sample=False, **options)


def measure() -> list[Row]:
    """On each rank: the least processor time of a word, in calls in which the contenders take turns."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=128, **SIZES)).eval()
    rows = []
    for name, shard in PLANS.items():
        calls = {"shardwise": words_of(shard(copy.deepcopy(plain))), "plain": words_of(plain)}
        best = least_processor_time(calls, warm_up=WARM_UP, steps=CALLS)
        seconds = {contender: each / NEW_WORDS for contender, each in best.items()}
        rows.append(Row(f"a generated word, {name}", seconds, f"≤ {MOST} plain", ("plain", MOST)))
    return rows


def run() -> list[Row]:
    """Measure on ranks of their own, and print what was found."""
    rows: list[Row] = run_on_ranks(2, measure, timeout=600, fresh=True)[0]
    show("Processor time of a generated word on 2 ranks", rows)
    return rows


if __name__ == "__main__":
    from benchmarks import generation  # as the ranks import it

    generation.run()
