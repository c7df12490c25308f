"""The tensor-parallel plan of a transformers model: words such as "colwise" by names of layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import nn

from shardwise.errors import PlanError
from shardwise.nn.plans.layers import LayerKind
from shardwise.nn.plans.reasons import LAYER
from shardwise.nn.sharding_plan.tree import join_path

Packing = Literal["", "halves"]

# What each word means for the parameters of a layer. Its meaning for activations is left out: ops of sharded tensors
# gather and reduce what they need.
WORDS: dict[str, tuple[LayerKind, Packing]] = {
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


class TransformersPlan:
    """The words for the layers of a model, with those of all models within it."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._words: dict[str, str] = {}
        for path, module in reversed(list(modules.items())):  # an outer model overrides an inner one
            plan = getattr(module, "_tp_plan", None)
            if not plan:
                config = getattr(module, "config", None)
                is_base = getattr(module, "base_model", None) is module
                plan = getattr(config, "base_model_tp_plan", None) if is_base else None
            if isinstance(plan, Mapping):
                self._words |= {join_path(path, name): word for name, word in plan.items()}

    def word(self, parameter: str, layer: str) -> str | None:
        """The word for a parameter, else for its layer."""
        for name in (parameter, layer):
            word = self._words.get(name, self._words.get(LAYER.sub("*", name)))
            if word is not None:
                return word
        return None

    @staticmethod
    def meaning(word: str, parameter: str) -> tuple[LayerKind, Packing]:
        """The meaning of a word for a parameter; or the error for an unknown word."""
        if word not in WORDS:
            raise PlanError(
                f"the sharding plan that the model carries says {word!r} of {parameter!r}, and that is none of the "
                f"words that are known: {', '.join(WORDS)}. Set another one in model._tp_plan, or write a sharding "
                "plan yourself, as in shard_module(model, {'**.q_proj.weight': 0})"
            )
        return WORDS[word]
