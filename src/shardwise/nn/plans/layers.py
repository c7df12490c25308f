"""Layers by their usual names: what tensor parallelism does with each, the layer of a parameter, and heads.

Layers come in pairs: the first is cut along its outputs ("column", as the field says of the transposed weight), the
second along its inputs ("row"), so that the activations between them lie in pieces and are never sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

LayerKind = Literal["column", "row", "experts", "plain"]


@dataclass(frozen=True)
class Role:
    """The purpose of a layer, which decides along which side of its weight it is cut."""

    kind: LayerKind
    what: str
    heads: Literal["", "queries", "keys"] = ""  # the heads along the dim that is cut
    packed: Literal["", "qkv", "kv", "halves"] = ""  # the layers that are packed into it


UP = Role("column", "first of a pair of layers")
DOWN = Role("row", "second of a pair of layers")
QUERY = Role("column", "queries of attention", "queries")
KEY = Role("column", "keys or values of attention", "keys")
OUT = Role("row", "output of attention", "queries")
PACKED = Role("column", "queries, keys and values in one", "queries", "qkv")
BY_HEAD = Role("column", "queries, keys and values in one, head by head", "keys")
HALVES = Role("column", "gate and first of a pair of layers in one", packed="halves")
WORD_TABLE = Role("column", "one row for each word")
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
    WORD_TABLE: "lm_head embed_out",
}
ROLES = {name: role for role, names in _NAMES.items() for name in names.split()}
IN_ATTENTION = dict.fromkeys(("out_proj", "c_proj", "wo", "Wo", "dense", "proj", "to_out"), OUT)
NO_WORDS = ("position", "pos_emb", "wpe", "type", "relative", "segment")  # in the names of small tables


def role_of(path: str, modules: Mapping[str, nn.Module], words: frozenset[int]) -> Role | None:
    """The role of the layer at this path, or of parameters of this name; None if the name is not known.

    ``words`` are sizes of vocabularies: a linear layer of so many outputs gives scores of words.
    """
    *around, name = path.split(".")
    if name.isdigit() and around and around[-1] == "to_out":  # a list of a layer and a dropout
        around, name = around[:-1], "to_out"
    module = _layer(path, modules)
    if isinstance(module, nn.Embedding):
        return FEW if any(mark in name.lower() for mark in NO_WORDS) else WORD_TABLE
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
    return WORD_TABLE if isinstance(module, nn.Linear) and rows in words else None


def vocabularies(modules: Mapping[str, nn.Module]) -> frozenset[int]:
    """The sizes of tables of words."""
    tables = ((path, module) for path, module in modules.items() if isinstance(module, nn.Embedding))
    return frozenset(
        table.num_embeddings for path, table in tables if role_of(path, modules, frozenset()) is WORD_TABLE
    )


def is_turned(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a layer has its weight as inputs by outputs, as the ``Conv1D`` of transformers has."""
    module = _layer(path, modules)
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _layer(path: str, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """The layer at a path, without an adapter around it."""
    module = modules.get(path)
    return getattr(module, "base_layer", module)


def _is_linear(module: nn.Module) -> bool:
    """Of a weight that a parametrization makes, what it is made of is looked at: to make it may change buffers."""
    if is_parametrized(module, "weight"):
        weight = next(module.get_submodule("parametrizations.weight").parameters(recurse=False), None)
    else:
        weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.ndim == 2


WRAPPED = "base_layer"  # where peft keeps the layer that it adapts
ADAPTERS = {"lora_A": "in", "lora_B": "out", "lora_embedding_A": "in", "lora_embedding_B": "out"}


@dataclass(frozen=True)
class ParameterName:
    """The parts of a parameter's name.

    >>> ParameterName.of("layers.0.q_proj.bias")
    ParameterName(parameter='layers.0.q_proj.bias', layer='layers.0.q_proj', is_bias=True, side='')
    >>> ParameterName.of("layers.0.q_proj.lora_B.default.weight").side, ParameterName.of("attn.in_proj_weight").layer
    ('out', 'attn.in_proj')
    """

    parameter: str  # as if no adapter were there
    layer: str
    is_bias: bool
    side: str  # of an adapter, which side of the layer it has: "in" or "out"

    @staticmethod
    def of(name: str) -> ParameterName:
        """The parts of this name."""
        *path, last = (part for part in name.split(".") if part != WRAPPED)
        at = next((k for k, part in enumerate(path) if part in ADAPTERS), None)
        if at is not None:
            return ParameterName(".".join((*path[:at], last)), ".".join(path[:at]), last == "bias", ADAPTERS[path[at]])
        parameter, is_bias = ".".join((*path, last)), last == "bias" or last.endswith("_bias")
        if last not in ("weight", "bias"):  # one that is no layer of its own, as those of nn.MultiheadAttention
            path.append(last.removesuffix("_weight").removesuffix("_bias"))
        return ParameterName(parameter, ".".join(path), is_bias, "")

    def dim(self, kind: LayerKind, ndim: int, *, turned: bool) -> int | None:
        """The dim that is cut; None if the parameter stays whole. ``turned``: a weight is inputs by outputs."""
        if kind == "plain" or not ndim:
            return None
        if kind == "experts":
            return 0
        if self.side:
            return {("column", "out"): 0, ("row", "in"): ndim - 1}.get((kind, self.side))
        if self.is_bias:
            return ndim - 1 if kind == "column" else None
        return ndim - 1 if (kind == "row") != turned else max(ndim - 2, 0)


HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead", "encoder_attention_heads", "heads")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "num_attention_groups")

SHARING = ("num_key_value_groups",)  # heads of queries to one of keys


@dataclass(frozen=True)
class Heads:
    """The numbers of query heads, and of key and value heads."""

    queries: int
    keys: int

    @property
    def groups(self) -> int:
        """Independent parts of attention: keys with their queries; with one key head, the queries."""
        return self.keys if self.keys > 1 else self.queries

    def __str__(self) -> str:
        if self.keys == self.queries:
            return f"{self.queries} head{'s' if self.queries > 1 else ''}"
        return f"{self.queries} heads of queries and {self.keys} of keys and values"


def heads_around(path: str, modules: Mapping[str, nn.Module]) -> Heads | None:
    """The heads of the innermost module around this path that has them as attributes or in its ``config``."""
    while True:
        module = modules.get(path)
        found = None if module is None else _heads_of(module)
        if found is not None or not path:
            return found
        path = path.rpartition(".")[0]


def _heads_of(module: nn.Module) -> Heads | None:
    config: Any = getattr(module, "config", None)
    text = getattr(config, "get_text_config", None)
    sources = [module, config, text() if callable(text) else None]
    queries = _first_number(sources, HEADS)
    if queries is None:
        return None
    keys, sharing = _first_number(sources, KEY_VALUE_HEADS), _first_number([module], SHARING)
    if sharing is not None and queries % sharing == 0:  # an attribute of the module holds for this layer
        keys = queries // sharing
    elif keys is None:
        keys = 1 if getattr(module, "multi_query", getattr(config, "multi_query", False)) is True else queries
    return Heads(queries, keys)


def _first_number(sources: list[Any], names: tuple[str, ...]) -> int | None:
    for source in sources:
        for name in names:
            try:
                value = getattr(source, name, None)
            except Exception:  # a config may raise for a number that differs from layer to layer
                continue
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None
