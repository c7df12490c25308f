"""Matching a state with a checkpoint: which stored tensor fills which, what does not fit, and the plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.archive import state_tree
from shardwise.checkpoint.archive.state_tree import Node, NodeKind, Path, entry_name
from shardwise.checkpoint.archive.stored import StoredTensor
from shardwise.checkpoint.optimizers import merge_param_groups, object_state, object_state_to_fill, param_groups
from shardwise.errors import StateMismatchError
from shardwise.nn.buffers import require_data
from shardwise.nn.plain_tensors import lacks_plain_memory

MOST_LISTED = 20  # of each kind of difference


@dataclass
class Match:
    """Tensors of a state with the stored tensors that fill them, and all differences.

    ``state`` and ``stored`` are the names of the two sides in messages.
    """

    convert: bool = False  # whether a tensor may be filled with values of another dtype
    state: str = "the state"
    stored: str = "the checkpoint"
    pairs: list[tuple[str, torch.Tensor, StoredTensor]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # names that only the state has
    unexpected: list[str] = field(default_factory=list)  # names that only the checkpoint has
    different: list[str] = field(default_factory=list)  # descriptions of entries that both have
    converted: bool = False  # whether ``convert`` would resolve a difference

    def compare(self, target: Node, stored: Node, path: Path = ()) -> None:
        """Record what fits and what does not, in both trees."""
        target, name = target.content, entry_name(path)
        if target.kind is stored.kind is NodeKind.TENSOR:
            self._compare_tensors(name, target.value, stored.value)
        elif target.kind is stored.kind is NodeKind.DICT:
            for key, child in target.children.items():
                if key in stored.children:
                    self.compare(child, stored.children[key], (*path, key))
                else:
                    self.missing += _names(child, (*path, key))
            for key, child in stored.children.items():
                if key not in target.children:
                    self.unexpected += _names(child, (*path, key))
        elif is_replaced_whole(target, stored):
            return
        elif target.kind is stored.kind and len(target.children) == len(stored.children) > 0:
            for key, child in target.children.items():
                self.compare(child, stored.children[key], (*path, key))
        else:
            self._differ(name, _describe(target), _describe(stored))

    def _compare_tensors(self, name: str, tensor: torch.Tensor, stored: StoredTensor) -> None:
        if tensor.shape != stored.size:
            self._differ(name, f"of size {tuple(tensor.shape)}", str(tuple(stored.size)))
        elif tensor.dtype != stored.dtype and not self.convert:
            self._differ(name, str(tensor.dtype), str(stored.dtype))
            self.converted = True
        elif stored.dtype.is_complex and not tensor.dtype.is_complex:
            self.different.append(f"'{name}' is {stored.dtype} in {self.stored}, which {tensor.dtype} cannot hold")
        else:
            self.pairs.append((name, tensor, stored))

    def _differ(self, name: str, mine: str, theirs: str) -> None:
        self.different.append(f"'{name}' is {mine} in {self.state} and {theirs} in {self.stored}")

    def require(self, what: str, *, strict: bool = True, part: bool = False, advice: bool = True) -> None:
        """Raise one error, beginning with ``what``, that lists all differences.

        Names that only one side has count if ``strict``; with ``part``, only those of the checkpoint. With ``advice``,
        the error names the options of `load` that accept the differences.
        """
        differences = [("different", self.different)]
        if strict:
            missing = [] if part else self.missing
            differences = [
                (f"missing in {self.stored}", missing),
                (f"not in {self.state}", self.unexpected),
                *differences,
            ]
        lines = [f"  {what}: {_listed(found)}" for what, found in differences if found]
        if not lines:
            return
        if strict and any("/state/" in f"/{name}" for name in self.unexpected):
            lines.append(
                "  (an optimizer has no state before its first step: give the optimizer, not its state_dict())"
            )
        if strict and advice and (self.missing or self.unexpected):
            lines.append("  (strict=False loads the names that both have)")
        if advice and self.converted:
            lines.append("  (convert=True converts values to the dtypes of the state)")
        raise StateMismatchError("\n".join([what, *lines]))


def is_replaced_whole(target: Node, stored: Node) -> bool:
    """Whether a stored plain value replaces the target as a whole. A stored dict replaces only None."""
    same = (target.kind is NodeKind.DICT) == (stored.kind is NodeKind.DICT) or target.value is None
    return same and target.is_value() and stored.is_value()


def apply_values(target: Node, stored: Node, in_step: RunInStep) -> Any:
    """Put the plain values of a checkpoint into a state whose tensors are filled; gives the state.

    First, one object after the other loads its state dict, in the checkpoint's order on all ranks, for
    ``load_state_dict`` may be collective. Then dicts and lists are changed in place, and tuples replaced.
    """
    for owned, there in _objects(target, stored):
        in_step(partial(_load_object, owned, there, in_step))
    return _with_values(target, stored)


RunInStep = Callable[[Callable[[], None]], None]  # runs work on all ranks, and raises on all if it fails on one


def count_objects(target: Node, stored: Node) -> int:
    """How often `apply_values` calls ``in_step``: once for each object that loads a state dict."""
    return sum(1 + count_objects(owned.children[0], there) for owned, there in _objects(target, stored))


def _objects(target: Node, stored: Node) -> Iterator[tuple[Node, Node]]:
    if target.kind is NodeKind.OBJECT:
        yield target, stored
        return
    for key, child in stored.children.items():
        if key in target.children:
            yield from _objects(target.children[key], child)


def _load_object(owned: Node, stored: Node, in_step: RunInStep) -> None:
    content = owned.children[0]
    groups = param_groups(owned.value, content.value)
    state = apply_values(content, stored, in_step)
    if groups is not None:
        state = {**state, "param_groups": merge_param_groups(groups, state["param_groups"])}
    owned.value.load_state_dict(state)


def _with_values(target: Node, stored: Node) -> Any:
    own = target.value
    if target.kind is stored.kind is NodeKind.DICT:
        for key, child in target.children.items():
            if key in stored.children:
                own[key] = _with_values(child, stored.children[key])
    elif target.kind in (NodeKind.TENSOR, NodeKind.OBJECT):
        return own
    elif is_replaced_whole(target, stored):
        if target.kind is stored.kind is NodeKind.LIST:
            own[:] = stored.value
        elif target.kind is stored.kind is NodeKind.TUPLE:
            return _tuple_like(own, stored.value)
        else:
            return stored.value
    else:
        items = [_with_values(child, stored.children[key]) for key, child in target.children.items()]
        if target.kind is NodeKind.TUPLE:
            return _tuple_like(own, items)
        own[:] = items
    return own


def _tuple_like(own: tuple[Any, ...], items: Sequence[Any]) -> Any:
    if all(new is old for new, old in zip(items, own, strict=False)) and len(items) == len(own):
        return own
    make = getattr(type(own), "_make", type(own))  # a named tuple takes its items one by one
    return make(items)


def _names(node: Node, path: Path) -> list[str]:
    """The names of the entries in a node, or of the node itself if it has none."""
    return [entry_name(at) for at, inner in node.walk(path) if not inner.children]


def _describe(node: Node) -> str:
    if node.kind is NodeKind.VALUE:
        return f"the value {node.value!r:.40}"
    if node.kind is NodeKind.TENSOR:
        size = node.value.size if isinstance(node.value, StoredTensor) else node.value.shape
        return f"a tensor of size {tuple(size)}, {node.value.dtype}"
    return f"a {node.kind.value} of {len(node.children)}"


def _listed(found: Sequence[str]) -> str:
    more = f" and {len(found) - MOST_LISTED} more" if len(found) > MOST_LISTED else ""
    return "; ".join(found[:MOST_LISTED]) + more


def match_state(state: Any, stored: Node, match: Match) -> Node:
    """The tree of a state, compared with the stored one; optimizers without state get empty tensors to fill.

    Changes nothing. May be collective, as an object's ``state_dict()`` may be.
    """
    target = state_tree.parse_state(state, lambda owner, path: object_state_to_fill(owner, stored.at(path), path))
    match.compare(target, stored)
    return target


def require_module_data(target: Node) -> None:
    """Raise where a module in a state would keep buffers without data."""
    for module in target.objects():
        if isinstance(module, nn.Module):
            require_data(module)


def modules_without_memory(state: Any) -> list[nn.Module]:
    """The modules in a state that were sharded on meta, and whose plain tensors have no memory yet."""
    tree = state_tree.parse_state(state, lambda owner, _: {})  # without state_dict() of objects
    return [one for one in tree.objects() if isinstance(one, nn.Module) and lacks_plain_memory(one)]


def objects_without_state(state: Any, stored: Node) -> list[Any]:
    """The objects with ``init_state()`` that lack state which the checkpoint has.

    Optimizers are not among them: `object_state_to_fill` makes their state, just for the parameters that have any.
    """
    found: list[Any] = []

    def content(owner: Any, path: state_tree.Path) -> Any:
        inner, there = object_state(owner), stored.at(path)
        lazy = callable(getattr(owner, "init_state", None)) and not isinstance(owner, torch.optim.Optimizer)
        if there is not None and lazy:
            match = Match()
            match.compare(state_tree.parse_state(inner, lambda nested, _: object_state(nested)), there)
            if match.unexpected:
                found.append(owner)
        return inner

    state_tree.parse_state(state, content)
    return found
