"""`compile`: the verb; and the way from `torch.compile(fullgraph=True)` to a full graph over sharded tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from shardwise.compilation.full_graph.local_graph import LocalGraph


def compile(model: Any, *, fullgraph: bool = False, **options: Any) -> Any:
    """Compile a model that is sharded in any way, with options of `torch.compile`. Every rank calls it alike.

    What each unit of a model computes between transfers becomes graphs of local tensors. The model is changed in place,
    and returned. In training, the first forward after a backward compiles; otherwise the second call::

        >>> model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
        >>> model = shardwise.compile(shardwise.fully_shard(model), backend="aot_eager")
        >>> batch = shardwise.from_local(torch.ones(1 + dist.get_rank(), 8))
        >>> model(batch).shape
        torch.Size([3, 8])

    The units are those of `fully_shard`; of other models, the members of lists of equal modules. Units that are alike
    share their graphs. A unit whose forward torch cannot trace without a break runs as before, and the modules in it
    are compiled instead.

    With ``fullgraph``, each rank runs one graph of the forward and one of the backward over its local tensors, and
    transfers between ranks are ops of these graphs, as by ``torch.compile(model, fullgraph=True)``. The first call of
    each kind is traced: other sizes, layouts or plain arguments are another kind. Inductor's code serves many sizes.
    What cannot be traced raises on every rank. A function is compiled likewise::

        >>> norm = shardwise.compile(lambda x: (x * x).sum().sqrt(), fullgraph=True, backend="aot_eager")
        >>> float(norm(shardwise.ones(0, 4, 4)))
        4.0
    """
    if fullgraph or not isinstance(model, nn.Module):
        return torch.compile(model, fullgraph=fullgraph, **options)
    from shardwise.compilation.units import compile_units

    return compile_units(model, options)


def local_graph(function: Callable[..., Any], *args: Any, **kwargs: Any) -> LocalGraph:
    """The forward of a call as a graph of aten ops on this rank's local tensors, as `make_fx` traces it.

    Every rank calls it alike: all succeed, or all raise. Nothing is computed; the tensors of the call are the graph's
    inputs::

        >>> weight = shardwise.ones(0, 4, 4)
        >>> graph = shardwise.compilation.local_graph(lambda w: (2 * w).sum(), weight)
        >>> float(graph.results(graph.module(*graph.inputs)))
        32.0
    """
    from shardwise.compilation.full_graph.local_graph import trace_call

    return trace_call(function, args, kwargs)


def in_one_graph(
    function: Callable[..., Any], plain: Callable[..., Any], make_backend: Callable[[], Callable[..., Any]]
) -> Callable[..., Any]:
    """A function that runs as a full graph if it has sharded tensors, among arguments or in modules; else ``plain``."""
    graph: Any = None  # once a sharded tensor was found
    modules: Any = None  # that the function uses, as they were in the last call

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal graph, modules
        if graph is None:
            if modules is None:
                from shardwise.compilation.full_graph.sharded_modules import UsedModules

                modules = UsedModules(function)
            if not modules.has_sharded(args, kwargs):
                return plain(*args, **kwargs)
            from shardwise.compilation.full_graph import FullGraph

            graph = FullGraph(function, plain, make_backend())
            call.full_graph = graph  # type: ignore[attr-defined] # for who asks how many graphs there are
        return graph(*args, **kwargs)

    return call
