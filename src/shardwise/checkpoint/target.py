"""The state that is to be filled, beside the one that is stored: room for all of it, and its tree."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.api.buffers import require_data
from shardwise.api.plain_memory import lacks_plain_memory
from shardwise.archive import nest
from shardwise.archive.nest import Node
from shardwise.checkpoint.matching import Match
from shardwise.checkpoint.optimizers import content_of, content_to_fill


def fitted(state: Any, stored: Node, match: Match) -> Node:
    """The tree of a state, with tensors to fill where optimizers have not made them yet; the match takes down what of
    it is filled. May be collective, as to ask an object for its state dict is; nothing is changed."""
    target = nest.parse(state, lambda owner, path: content_to_fill(owner, stored.at(path), path))
    match.compare(target, stored)
    return target


def require_data_of(target: Node) -> None:
    """Raise where a module in a state would be left with buffers that have no data."""
    for module in target.objects():
        if isinstance(module, nn.Module):
            require_data(module)


def without_memory(state: Any) -> list[nn.Module]:
    """The modules in a state that were made on meta and then sharded, and still lack memory for what stays plain."""
    tree = nest.parse(state, lambda owner, _: {})  # without asking objects for their states
    return [one for one in tree.objects() if isinstance(one, nn.Module) and lacks_plain_memory(one)]


def without_room(state: Any, stored: Node) -> list[Any]:
    """The objects that can make room for state which is stored and they have not.

    For optimizers it is made here, just for what was saved: none for a parameter that was never updated.
    """
    found: list[Any] = []

    def content(owner: Any, path: nest.Path) -> Any:
        inner, there = content_of(owner), stored.at(path)
        lazy = callable(getattr(owner, "init_state", None)) and not isinstance(owner, torch.optim.Optimizer)
        if there is not None and lazy:
            match = Match()
            match.compare(nest.parse(inner, lambda nested, _: content_of(nested)), there)
            if match.unexpected:
                found.append(owner)
        return inner

    nest.parse(state, content)
    return found
