"""What Python values hold before a call is traced: it is put back, for a graph would change nothing of it later."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch

from shardwise.compilation.full_graph.compared_values import (
    BOUND,
    BY_IDENTITY,
    BY_VALUE,
    COLLECTIONS,
    DEPTH,
    DEPTH_OF_OBJECT,
    MOST_COMPARED,
    Members,
    flat,
    slots_of,
)
from shardwise.errors import UnsupportedOpError


class ValuesBefore:
    """What collections and objects hold, as deep as values are compared."""

    def __init__(self, values: Iterable[Any], members: Members) -> None:
        """``members`` gives the attributes of an object that are compared."""
        self._members = members
        self._held: dict[int, tuple[Any, Any]] = {}  # by the id of a value: the value, and what it held
        for value in values:
            self._note(value, DEPTH)

    def _note(self, value: Any, depth: int) -> None:
        if isinstance(value, BOUND):
            value = value.__self__
        if type(value) in BY_VALUE or isinstance(value, (slice, torch.Tensor, *BY_IDENTITY)):
            return
        if depth <= 0 or id(value) in self._held or len(self._held) >= MOST_COMPARED:
            return
        if isinstance(value, COLLECTIONS):
            if len(value) > MOST_COMPARED:
                return
            members, deeper = flat(value), depth - 1
        else:
            found = self._members(value)
            if found is None:
                return
            members, deeper = found.values(), depth - DEPTH_OF_OBJECT
        self._held[id(value)] = value, content_of(value)
        for member in members:
            self._note(member, deeper)

    def put_back(self) -> None:
        """Let all hold again what they held."""
        for value, content in self._held.values():
            if not has_content(content_of(value), content):
                put_content(value, content)


def refused_change(what: str) -> UnsupportedOpError:
    """The error of a call that changes something in Python."""
    return UnsupportedOpError(
        f"the compiled call changes {what}, which a graph cannot do: change it outside of the call, or compile without "
        "fullgraph"
    )


def content_of(value: Any) -> Any:
    """A copy of a collection; of an object its attributes, and those in slots."""
    if isinstance(value, COLLECTIONS):
        return dict(value) if isinstance(value, dict) else value if isinstance(value, frozenset) else list(value)
    slots = {name: getattr(value, name) for name in slots_of(value.__class__) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


def has_content(now: Any, before: Any) -> bool:
    """Whether a copy has the same objects as another."""
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return list(now) == list(before) and all(map(operator.is_, now.values(), before.values()))
    return all(map(operator.is_, now, before))


def put_content(value: Any, content: Any) -> None:
    """Let a collection or an object hold again what it held."""
    if isinstance(value, list):
        value[:] = content
    elif isinstance(value, dict | set):
        value.clear()
        value.update(content)
    elif not isinstance(value, tuple | frozenset):
        own = getattr(value, "__dict__", {})
        for name in {*own, *slots_of(value.__class__)} - content.keys():
            if hasattr(value, name):
                object.__delattr__(value, name)
        for name, one in content.items():
            object.__setattr__(value, name, one)
