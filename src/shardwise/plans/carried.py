"""The plan that a transformers model carries: words such as "colwise" by names of layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import nn

from shardwise.errors import PlanError
from shardwise.plans.projections import Kind
from shardwise.plans.reasons import LAYER
from shardwise.sharding_plan.tree import join

Packing = Literal["", "halves"]

# What each word says of the parameters of a layer. What it says of activations is left out: an op of sharded tensors
# finds by itself what must be gathered or added up.
WORDS: dict[str, tuple[Kind, Packing]] = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output", "local_colwise"), ("column", "")),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input", "local_rowwise"), ("row", "")),
    **dict.fromkeys(("packed_colwise", "local_packed_colwise"), ("column", "halves")),
    **dict.fromkeys(("packed_rowwise", "local_packed_rowwise"), ("row", "halves")),
    "embedding_rowwise": ("column", ""),  # one row for each word: the rows of a table are cut
    "embedding_colwise": ("row", ""),
    "grouped_gemm": ("experts", ""),
    **dict.fromkeys(("replicate", "replicated", "replicated_with_grad_allreduce", "sequence_parallel"), ("plain", "")),
    **dict.fromkeys(("local", "gather", "all_reduce", "mla_kv_a_proj"), ("plain", "")),
    **dict.fromkeys(("moe_tp_experts", "moe_identity_expert", "ep_router", "ep_dispatch_experts"), ("plain", "")),
}


class CarriedPlan:
    """The words for the layers of a model, with those of all models within it."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._words: dict[str, str] = {}
        for path, module in reversed(list(modules.items())):  # what is said further out holds
            plan = getattr(module, "_tp_plan", None)
            if not plan:
                config = getattr(module, "config", None)
                is_base = getattr(module, "base_model", None) is module
                plan = getattr(config, "base_model_tp_plan", None) if is_base else None
            if isinstance(plan, Mapping):
                self._words |= {join(path, name): word for name, word in plan.items()}

    def word(self, parameter: str, layer: str) -> str | None:
        """What is said of a parameter or, failing that, of the layer that it belongs to."""
        for name in (parameter, layer):
            word = self._words.get(name, self._words.get(LAYER.sub("*", name)))
            if word is not None:
                return word
        return None

    @staticmethod
    def meaning(word: str, parameter: str) -> tuple[Kind, Packing]:
        """What a word says of a parameter; or the error that no such word is known."""
        if word not in WORDS:
            raise PlanError(
                f"the plan that the model carries says {word!r} of {parameter!r}, and that is none of the words that "
                f"are known: {', '.join(WORDS)}. Set another one in model._tp_plan, or write a plan yourself, as in "
                "shard_module(model, {'**.q_proj.weight': 0})"
            )
        return WORDS[word]
