"""What differs between the calls of a function that has too many graphs: for the error that says so."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from shardwise.compilation.full_graph.compared_values import shown
from shardwise.compilation.full_graph.guards import Values
from shardwise.compilation.full_graph.inputs import CallKey, Place
from shardwise.torch_private import pytree

MOST_NAMED = 3  # of what differs, and of the values of each
SETTINGS = ("gradients are recorded", "the default dtype", "settings of shardwise", "registered ops", "flags of torch")


class GraphKey(NamedTuple):
    """What a graph depends on, the same on every rank."""

    process: tuple[Any, ...]  # settings, see `process_key`
    attributes: Values  # of modules
    used: Values  # that the function uses
    call: CallKey


def what_differs(function: Callable[..., Any], places: Sequence[Place], keys: Sequence[GraphKey]) -> str:
    """What most of these calls differ in, with some of the values."""
    found: dict[str, dict[str, None]] = {}
    for key in keys:
        for name, value in _described(function, places, key):
            found.setdefault(name, {})[value] = None
    different = sorted(
        [(name, list(each)) for name, each in found.items() if len(each) > 1], key=lambda one: -len(one[1])
    )
    return "; ".join(f"{name}, {len(each)} times ({_some(each)})" for name, each in different[:MOST_NAMED])


def _some(values: list[str]) -> str:
    return ", ".join(values[:MOST_NAMED]) + (", ..." if len(values) > MOST_NAMED else "")


def _described(function: Callable[..., Any], places: Sequence[Place], key: GraphKey) -> Iterator[tuple[str, str]]:
    """Names and values of all that a key is made of."""
    call = key.call
    for place, placed in zip(places, call.of_places, strict=False):
        yield f"the tensor '{place.path}' of a module", str(call.placed[placed])
    yield "the number and the nesting of the arguments", f"{call.structure.num_leaves} in all"
    leaves = zip(argument_names(function, call.structure), call.of_leaves, call.constants, strict=True)
    for name, number, constant in leaves:
        if number is None:
            yield f"the value of {name}", shown(*constant)
        else:
            yield f"the size or kind of {name}", str((*call.placed, *call.added)[number])
    for path, values in key.attributes.each:
        for name, *value in values:
            yield f"the attribute '{f'{path}.{name}'.lstrip('.')}' of a module", shown(*value)
    for values in key.used.each:
        for name, *value in values:
            yield f"the value '{name}' that the function uses", shown(*value)
    for name, setting in zip((*SETTINGS, "autocast", "the default device"), key.process, strict=True):
        yield name, str(setting)


def argument_names(function: Callable[..., Any], structure: Any) -> list[str]:
    """A name for each leaf of the arguments, in the words of the function's signature if it has one."""
    try:
        parameters = [str(one) for one in inspect.signature(getattr(function, "forward", function)).parameters]
    except (TypeError, ValueError):  # a function that is not written in Python
        parameters = []
    numbers = pytree.tree_unflatten(list(range(structure.num_leaves)), structure)
    names = []
    for path, _ in pytree.tree_flatten_with_path(numbers)[0]:
        _, own, *rest = path
        if isinstance(own, pytree.SequenceKey):
            where = parameters[own.idx] if own.idx < len(parameters) else f"number {own.idx + 1}"
        else:
            where = pytree.keystr((own,)).strip("[']")
        names.append(f"the argument '{where}{pytree.keystr(tuple(rest))}'")
    return names
