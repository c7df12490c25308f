"""Compiled code that serves calls of several sizes, such as batches of other lengths.

Each size is traced by itself, for it has layouts of its own. The graphs of local tensors that come of it mostly differ
in integers alone. So from the second size on, integers that differ are inputs of the code that a compiler makes, and
further sizes run that code as it is, if everything is true of them that the compiler took for granted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from shardwise.compilation.full_graph.graph_outline import GraphOutline
from shardwise.compilation.full_graph.sized_graph import SizeColumns, SizedGraph
from shardwise.ops.engine.call_cache import FLAGS
from shardwise.torch_private import load_private

logger = logging.getLogger(__name__)
MOST_SEEN = 16  # sizes that are compared, to find integers that go together
Code = Callable[[list[Any]], Any]  # takes its inputs as a list, which it empties
Compiler = Callable[..., Code]  # of a graph of aten ops, and of tensors without data in place of its inputs


@dataclass
class _AlikeGraphs:
    """Graphs that differ in integers alone, and the code for all of them."""

    seen: list[tuple[int, ...]] = field(default_factory=list)  # the integers of some, the last ones
    graph: SizedGraph | None = None
    code: Code | None = None
    is_static: bool = False  # the compiler cannot take the sizes as inputs

    def code_for(self, outline: GraphOutline) -> Code | None:
        """The code for a graph, if there is one that serves it."""
        values = None if self.graph is None else self.graph.values_for(outline)
        return None if values is None or self.code is None else _with_sizes(self.code, values)


class DynamicSizes:
    """A compiler of graphs that makes one code for many sizes, by means of a compiler that makes code for a graph."""

    def __init__(self, compile: Compiler) -> None:
        self._compile = compile
        self._alike: dict[tuple[Any, ...], _AlikeGraphs] = {}
        self.compilations = 0  # by the other compiler

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Code:
        """The code for a graph."""
        outline = GraphOutline.of(module.graph, inputs)
        if outline is None:
            return self._one_size(module, inputs, options)
        kind = [bool(options.get(name)) for name in ("is_backward", "is_inference", "cudagraphs")]
        alike = self._alike.setdefault((outline.common, *kind, *[read() for read in FLAGS]), _AlikeGraphs())
        code = alike.code_for(outline)
        if code is not None:
            return code
        alike.seen = [*alike.seen[-MOST_SEEN:], outline.integers]
        if len(alike.seen) > 1 and not alike.is_static:
            try:
                return self._many_sizes(alike, module, inputs, outline, options)
            except Exception as error:  # of any kind: then each size is compiled by itself
                logger.info("this graph takes no sizes as inputs, so each size is compiled by itself: %s", error)
                alike.is_static = True
        return self._one_size(module, inputs, options)

    def _one_size(self, module: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Code:
        self.compilations += 1
        return self._compile(module, inputs, **options)

    def _many_sizes(
        self,
        alike: _AlikeGraphs,
        module: fx.GraphModule,
        inputs: Sequence[torch.Tensor],
        outline: GraphOutline,
        options: dict[str, Any],
    ) -> Code:
        graph = SizedGraph(module, inputs, outline, SizeColumns.of(alike.seen))
        aligned = [k for k in options.get("static_input_idxs", ()) if outline.is_aligned[k]]
        static = [len(graph.sizes) + k for k in aligned]  # inputs come after the sizes
        given = {**options, "static_input_idxs": static}
        tracing, context = load_private("torch._guards.tracing"), load_private("torch._guards.TracingContext")
        self.compilations += 1
        with tracing(context(graph.mode)), load_private("torch._inductor.virtualized.V").set_fake_mode(graph.mode):
            code = self._compile(graph.module, [*graph.sizes, *graph.tensors], **given)
        alike.graph, alike.code = graph, code
        found = alike.code_for(outline)
        assert found is not None, "code serves the size that it was compiled for"
        return found


def _with_sizes(code: Code, sizes: Sequence[int]) -> Code:
    """The code for one size."""

    def run(inputs: list[Any]) -> Any:
        given = [*sizes, *inputs]
        inputs.clear()
        return code(given)

    run._boxed_call = True  # type: ignore[attr-defined] # says to torch that it takes a list
    return run
