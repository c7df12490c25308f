"""The usual names of projections, and what tensor parallelism does with each of them.

Layers come in pairs: the first is cut along its outputs ("column", as the field says of the weight of outputs by
inputs turned), the second along its inputs ("row"), so that what is between them lies in pieces and is never sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

Kind = Literal["column", "row", "experts", "plain"]


@dataclass(frozen=True)
class Role:
    """What a layer is for, and so along which side of its weight it is cut."""

    kind: Kind
    what: str
    heads: Literal["", "queries", "keys"] = ""  # whose heads lie along the dim that is cut
    packed: Literal["", "qkv", "kv", "halves"] = ""  # which layers lie one behind the other in it


UP = Role("column", "first of a pair of layers")
DOWN = Role("row", "second of a pair of layers")
QUERY = Role("column", "queries of attention", "queries")
KEY = Role("column", "keys or values of attention", "keys")
OUT = Role("row", "output of attention", "queries")
PACKED = Role("column", "queries, keys and values in one", "queries", "qkv")
BY_HEAD = Role("column", "queries, keys and values in one, head by head", "keys")
HALVES = Role("column", "gate and first of a pair of layers in one", packed="halves")
WORDS = Role("column", "one row for each word")
FEW = Role("plain", "a small table")
EXPERTS = Role("experts", "one matrix for each expert")

_NAMES = {
    UP: "fc1 fc_in lin1 linear1 linear_fc1 up_proj gate_proj w1 w3 wi wi_0 wi_1 c_fc dense_h_to_4h intermediate_dense "
    "ffn",
    DOWN: "fc2 fc_out lin2 linear2 linear_fc2 down_proj w2 dense_4h_to_h output_dense ffn_output out_proj c_proj wo Wo",
    QUERY: "q_proj query q q_lin wq to_q q_attn query_proj linear_q q_b_proj kv_b_proj",
    KEY: "k_proj key k k_lin wk to_k key_proj linear_k v_proj value v v_lin wv to_v value_proj linear_v",
    OUT: "o_proj o out_lin attn_out",
    PACKED: "c_attn Wqkv qkv qkv_proj",
    BY_HEAD: "query_key_value",
    HALVES: "gate_up_proj Wi",
    WORDS: "lm_head embed_out",
}
ROLES = {name: role for role, names in _NAMES.items() for name in names.split()}
IN_ATTENTION = dict.fromkeys(("out_proj", "c_proj", "wo", "Wo", "dense", "proj", "to_out"), OUT)
NO_WORDS = ("position", "pos_emb", "wpe", "type", "relative", "segment")  # in the names of small tables


def role_of(path: str, modules: Mapping[str, nn.Module], words: frozenset[int]) -> Role | None:
    """The role of the layer at this path, or of the parameters of this name, if it is one of those that are known.

    ``words`` are sizes of vocabularies: a linear layer of so many outputs gives scores of words.
    """
    *around, name = path.split(".")
    if name.isdigit() and around and around[-1] == "to_out":  # a list of a layer and a dropout
        around, name = around[:-1], "to_out"
    module = _layer(path, modules)
    if isinstance(module, nn.Embedding):
        return FEW if any(mark in name.lower() for mark in NO_WORDS) else WORDS
    if module is not None and not _is_linear(module):
        return None
    above = modules.get(".".join(around))
    if name == "in_proj":
        return PACKED if isinstance(above, nn.MultiheadAttention) else None
    if module is None and around and around[-1] == "experts":
        return EXPERTS
    attends = "attention" in type(above).__name__.lower() or any(
        mark in part.lower() for part in around[-2:] for mark in ("attn", "attention")
    )
    if attends and name in IN_ATTENTION:
        return IN_ATTENTION[name]
    if name == "dense" and around:
        return {"intermediate": UP, "output": DOWN}.get(around[-1])
    if name == "c_attn" and getattr(above, "is_cross_attention", False) is True:
        return Role("column", "keys and values in one", "keys", "kv")
    if name in ROLES:
        return ROLES[name]
    rows = getattr(module, "out_features", None)
    return WORDS if isinstance(module, nn.Linear) and rows in words else None


def vocabularies(modules: Mapping[str, nn.Module]) -> frozenset[int]:
    """The sizes of tables of words."""
    tables = ((path, module) for path, module in modules.items() if isinstance(module, nn.Embedding))
    return frozenset(table.num_embeddings for path, table in tables if role_of(path, modules, frozenset()) is WORDS)


def is_turned(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a layer has its weight as inputs by outputs, as the ``Conv1D`` of transformers has."""
    module = _layer(path, modules)
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _layer(path: str, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """The layer at a path; the one within, if an adapter is wrapped around it."""
    module = modules.get(path)
    return getattr(module, "base_layer", module)


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.ndim == 2
