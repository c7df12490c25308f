"""What is stored beside the state that is to be filled: which tensor goes where, and all that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from shardwise.archive.nest import Kind, Node, Path, name_of
from shardwise.archive.stored import StoredTensor
from shardwise.checkpoint.optimizers import groups_of, with_all_parameters
from shardwise.errors import StateMismatchError

MOST_LISTED = 20  # of each kind of difference


@dataclass
class Match:
    """Tensors of a state with those of a checkpoint that fill them, and what is different.

    What fills them may also be a state of other ranks: ``stored`` is how messages call it, and ``state`` the one that
    is filled.
    """

    convert: bool = False  # whether a tensor may be filled with values of another dtype
    state: str = "the state"
    stored: str = "the checkpoint"
    pairs: list[tuple[str, torch.Tensor, StoredTensor]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # names that only the state has
    unexpected: list[str] = field(default_factory=list)  # names that only the checkpoint has
    different: list[str] = field(default_factory=list)  # what is said of names that both have
    converted: bool = False  # whether any of these would fit if values were converted

    def compare(self, target: Node, stored: Node, path: Path = ()) -> None:
        """Take down what fits and what does not, in these and all they contain."""
        target, name = target.content, name_of(path)
        if target.kind is stored.kind is Kind.TENSOR:
            self._compare_tensors(name, target.own, stored.own)
        elif target.kind is stored.kind is Kind.DICT:
            for key, child in target.children.items():
                if key in stored.children:
                    self.compare(child, stored.children[key], (*path, key))
                else:
                    self.missing += _names(child, (*path, key))
            for key, child in stored.children.items():
                if key not in target.children:
                    self.unexpected += _names(child, (*path, key))
        elif replaced_whole(target, stored):
            return
        elif target.kind is stored.kind and len(target.children) == len(stored.children) > 0:
            for key, child in target.children.items():
                self.compare(child, stored.children[key], (*path, key))
        else:
            self._differ(name, _what(target), _what(stored))

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
        """Raise one error with all that does not fit, after what it says first; names that only one side has are no
        matter unless strict, and those that only the state has neither where a part of the checkpoint was asked for.
        With ``advice``, it says how `load` can be told otherwise."""
        told = [("different", self.different)]
        if strict:
            missing = [] if part else self.missing
            told = [(f"missing in {self.stored}", missing), (f"not in {self.state}", self.unexpected), *told]
        lines = [f"  {what}: {_listed(found)}" for what, found in told if found]
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


def replaced_whole(target: Node, stored: Node) -> bool:
    """Whether what the checkpoint has is a value that takes the place of what is there: dicts only of None."""
    same = (target.kind is Kind.DICT) == (stored.kind is Kind.DICT) or target.own is None
    return same and target.is_value() and stored.is_value()


def settle(target: Node, stored: Node, in_step: InStep) -> Any:
    """Put the plain values of a checkpoint into a state whose tensors are filled; gives the state.

    First each object is given its state dict, complete, when all ranks have given the one before; then dicts and lists
    are changed in place, tuples made anew. Objects come in the checkpoint's order, for theirs may be collectives.
    """
    for owned, there in _objects(target, stored):
        in_step(partial(_give, owned, there, in_step))
    return _with_values(target, stored)


InStep = Callable[[Callable[[], None]], None]  # does something on all ranks, and raises on all if it fails on one


def count_objects(target: Node, stored: Node) -> int:
    """How often `settle` calls ``in_step``: once for each object that is given a state dict."""
    return sum(1 + count_objects(owned.children[0], there) for owned, there in _objects(target, stored))


def _objects(target: Node, stored: Node) -> Iterator[tuple[Node, Node]]:
    if target.kind is Kind.OBJECT:
        yield target, stored
        return
    for key, child in stored.children.items():
        if key in target.children:
            yield from _objects(target.children[key], child)


def _give(owned: Node, stored: Node, in_step: InStep) -> None:
    content = owned.children[0]
    groups = groups_of(owned.own, content.own)
    state = settle(content, stored, in_step)
    if groups is not None:
        state = {**state, "param_groups": with_all_parameters(groups, state["param_groups"])}
    owned.own.load_state_dict(state)


def _with_values(target: Node, stored: Node) -> Any:
    own = target.own
    if target.kind is stored.kind is Kind.DICT:
        for key, child in target.children.items():
            if key in stored.children:
                own[key] = _with_values(child, stored.children[key])
    elif target.kind in (Kind.TENSOR, Kind.OBJECT):
        return own
    elif replaced_whole(target, stored):
        if target.kind is stored.kind is Kind.LIST:
            own[:] = stored.own
        elif target.kind is stored.kind is Kind.TUPLE:
            return _tuple_like(own, stored.own)
        else:
            return stored.own
    else:
        items = [_with_values(child, stored.children[key]) for key, child in target.children.items()]
        if target.kind is Kind.TUPLE:
            return _tuple_like(own, items)
        own[:] = items
    return own


def _tuple_like(own: tuple[Any, ...], items: Sequence[Any]) -> Any:
    if all(new is old for new, old in zip(items, own, strict=False)) and len(items) == len(own):
        return own
    make = getattr(type(own), "_make", type(own))  # a named tuple wants its items one by one
    return make(items)


def _names(node: Node, path: Path) -> list[str]:
    """The entries in a node, or itself where there are none."""
    return [name_of(at) for at, inner in node.walk(path) if not inner.children]


def _what(node: Node) -> str:
    if node.kind is Kind.VALUE:
        return f"the value {node.own!r:.40}"
    if node.kind is Kind.TENSOR:
        size = node.own.size if isinstance(node.own, StoredTensor) else node.own.shape
        return f"a tensor of size {tuple(size)}, {node.own.dtype}"
    return f"a {node.kind.value} of {len(node.children)}"


def _listed(found: Sequence[str]) -> str:
    more = f" and {len(found) - MOST_LISTED} more" if len(found) > MOST_LISTED else ""
    return "; ".join(found[:MOST_LISTED]) + more
