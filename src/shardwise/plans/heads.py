"""How many heads attention has: by the module around a projection, or by its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead", "encoder_attention_heads", "heads")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "num_attention_groups")

SHARING = ("num_key_value_groups",)  # heads of queries to one of keys


@dataclass(frozen=True)
class Heads:
    """Heads of queries, and of keys and values, which as many queries share as there are more of them."""

    queries: int
    keys: int

    @property
    def groups(self) -> int:
        """Into how many parts attention falls: keys with the queries that look at them; with one key, the queries."""
        return self.keys if self.keys > 1 else self.queries

    def __str__(self) -> str:
        if self.keys == self.queries:
            return f"{self.queries} head{'s' if self.queries > 1 else ''}"
        return f"{self.queries} heads of queries and {self.keys} of keys and values"


def heads_around(path: str, modules: Mapping[str, nn.Module]) -> Heads | None:
    """The heads of the innermost module around this path that tells them, itself or in its ``config``."""
    while True:
        module = modules.get(path)
        found = None if module is None else _told_by(module)
        if found is not None or not path:
            return found
        path = path.rpartition(".")[0]


def _told_by(module: nn.Module) -> Heads | None:
    config: Any = getattr(module, "config", None)
    text = getattr(config, "get_text_config", None)
    sources = [module, config, text() if callable(text) else None]
    queries = _first_number(sources, HEADS)
    if queries is None:
        return None
    keys, sharing = _first_number(sources, KEY_VALUE_HEADS), _first_number([module], SHARING)
    if sharing is not None and queries % sharing == 0:  # told by the module itself, it holds for this layer
        keys = queries // sharing
    elif keys is None:
        keys = 1 if getattr(module, "multi_query", getattr(config, "multi_query", False)) is True else queries
    return Heads(queries, keys)


def _first_number(sources: list[Any], names: tuple[str, ...]) -> int | None:
    for source in sources:
        for name in names:
            try:
                value = getattr(source, name, None)
            except Exception:  # a config may refuse to tell what differs from layer to layer
                continue
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None
