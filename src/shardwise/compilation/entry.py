"""`compile`: the verb; and the way from `torch.compile(fullgraph=True)` to a full graph over sharded tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.tensor import ShardedTensorBase
from shardwise.torch_private import pytree


def compile(
    model: Callable[..., Any],
    *,
    fullgraph: bool = False,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    """A module or function that runs compiled, as `torch.compile` gives it; its tensors may be sharded in any way.

    With ``fullgraph``, each rank runs one graph of the forward and one of the backward over its local tensors, and
    transfers between ranks are ops of these graphs. Every rank calls the result alike; the first call of each kind
    compiles. Other sizes, layouts or plain arguments are another kind of call. What cannot be traced raises on every
    rank::

        >>> norm = shardwise.compile(lambda x: (x * x).sum().sqrt(), fullgraph=True, backend="aot_eager")
        >>> float(norm(shardwise.ones(0, 4, 4)))
        4.0
    """
    return torch.compile(model, fullgraph=fullgraph, backend=backend, mode=mode, options=options)


def in_one_graph(
    function: Callable[..., Any], plain: Callable[..., Any], make_backend: Callable[[], Callable[..., Any]]
) -> Callable[..., Any]:
    """A function that runs as a full graph if it has sharded tensors, among arguments or in modules; else ``plain``."""
    graph: Any = None  # once a sharded tensor was found

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal graph
        if graph is None:
            if not _has_sharded(function, args, kwargs):
                return plain(*args, **kwargs)
            from shardwise.compilation.full_graph import FullGraph

            graph = FullGraph(function, make_backend())
            call.full_graph = graph  # type: ignore[attr-defined] # for who asks how many graphs there are
        return graph(*args, **kwargs)

    return call


def _has_sharded(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    if any(isinstance(leaf, ShardedTensorBase) for leaf in pytree.tree_leaves((args, kwargs))):
        return True
    from shardwise.compilation.inputs import modules_of

    modules: list[nn.Module] = modules_of(function)
    return any(
        isinstance(tensor, ShardedTensorBase)
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
    )
