"""A call as a function of plain local tensors, which a compiler can trace; and the way back from its results.

The compiler's tracer runs the call as it is: the ops of the library compute on the tracer's tensors in place of local
ones, and transfers become ops of the graph (`graph_ops`). What the tracer sees is aten ops on local tensors, forward
and backward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.compilation.full_graph.boundary import enter_graph, leave_graph
from shardwise.compilation.full_graph.graph_ops import GraphTransfers
from shardwise.compilation.full_graph.input_forms import COPIED_FIELDS, InputForm
from shardwise.compilation.full_graph.inputs import CallForm
from shardwise.errors import UnsupportedOpError
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.frame import Frame
from shardwise.torch_private import pytree


class _Sharded(NamedTuple):
    """A sharded result."""

    cls: type[ShardedTensorBase]
    frame: Frame
    tensors: int  # how many there are in the graph
    has_shards: bool
    fields: dict[str, Any]

    def of(self, tensors: list[torch.Tensor]) -> ShardedTensorBase:
        """The result, made of what a graph gave."""
        made = self.cls._of_locals(self.frame, tensors if self.has_shards else [])
        for name, value in self.fields.items():
            setattr(made, name, value)
        if not self.has_shards and tensors:
            made._wants_grad, made._anchor = True, tensors[0]
        return made


class Results(NamedTuple):
    """The results of a call in terms of the outputs of its graph."""

    structure: Any
    leaves: list[Any]  # a `_Sharded`, `PLAIN`, or what the call gives as it is

    def of(self, outputs: Sequence[torch.Tensor]) -> Any:
        """What the call gives, made of these outputs."""
        rest = iter(outputs)
        found: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, _Sharded):
                found.append(leaf.of([next(rest) for _ in range(leaf.tensors)]))
            else:
                found.append(next(rest) if leaf is PLAIN else leaf)
        return pytree.tree_unflatten(found, self.structure)


PLAIN = object()


def split_results(result: Any) -> tuple[Results, list[torch.Tensor]]:
    """What a call gave: its form, and its tensors."""
    leaves, structure = pytree.tree_flatten(result)
    forms: list[Any] = []
    tensors: list[torch.Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, ShardedTensorBase):
            each = leaf._in_graph()
            fields = {
                name: value for name in COPIED_FIELDS if (value := getattr(leaf, name)) != getattr(type(leaf), name)
            }
            forms.append(_Sharded(type(leaf), leaf._frame, len(each), bool(leaf._local_tensors()), fields))
            tensors += each
        elif isinstance(leaf, torch.Tensor):
            forms.append(PLAIN)
            tensors.append(leaf)
        elif _holds_tensors(leaf):
            raise UnsupportedOpError(
                f"the compiled call gives a {type(leaf).__name__} with tensors in it, which a graph cannot make: give "
                "tensors, and lists, tuples and dicts of these, or register the type in torch.utils._pytree"
            )
        else:
            forms.append(leaf)
    return Results(structure, forms), tensors


def _holds_tensors(value: Any) -> bool:
    """Whether an object has tensors among its attributes, or in lists, tuples and dicts there."""
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(getattr(value, "__dict__", ())))


class TracedCall:
    """A function of a token and of local tensors that makes a call; `results` says what its outputs are.

    It keeps no tensor of the call: a compiler may keep it.
    """

    def __init__(self, function: Callable[..., Any], form: CallForm) -> None:
        self._function, self._form = function, form
        self.transfers = GraphTransfers()
        self.results: Results | None = None
        self.written: tuple[int, ...] = ()  # the numbers of the tensors that the call writes into

    def __call__(self, token: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The token of the last transfer, then the tensors of the results."""
        self.transfers.begin(token)
        rest, forms = iter(tensors), self._form.inputs
        each = [[next(rest) for _ in range(form.count)] for form in forms]
        made = enter_graph(self.transfers, token, forms, each)
        locals_before = [_locals_of(one) for one in made]
        with self._form.replaced(made) as (args, kwargs):
            result = self._function(*args, **kwargs)
        for form, one, own in zip(forms, made, locals_before, strict=True):
            _require_same_shards(form, one, own)
        self.results, outs = split_results(result)
        outs = leave_graph(self.transfers, outs)
        return self.transfers.token, *outs


def _locals_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    return list(tensor._local_tensors()) if isinstance(tensor, ShardedTensorBase) else []


def _require_same_shards(form: InputForm, tensor: torch.Tensor, before: list[torch.Tensor]) -> None:
    """Raise if a call has given a sharded tensor another layout or other local tensors."""
    if isinstance(tensor, ShardedTensorBase):
        now = tensor._local_tensors()
        if tensor._frame is not form.frame or len(now) != len(before) or not all(map(operator.is_, now, before)):
            raise UnsupportedOpError(
                f"the compiled call gives a sharded tensor of size {tuple(form.shape)} another layout, dtype or other "
                "local tensors in place, which a graph cannot do: give the new tensor as a result (redistribute), or "
                "compile without fullgraph"
            )


def graph_module(traced: TracedCall, inputs: int, outputs: int) -> torch.fx.GraphModule:
    """A graph of one node, which makes the traced call: what backends of `torch.compile` take."""
    graph = torch.fx.Graph()
    names = [graph.placeholder(f"local_{k}") for k in range(inputs)]

    def sharded_call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return traced(*tensors)

    made = graph.call_function(sharded_call, tuple(names))
    graph.output(tuple(graph.call_function(operator.getitem, (made, k)) for k in range(outputs)))
    return torch.fx.GraphModule({}, graph)
