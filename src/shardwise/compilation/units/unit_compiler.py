"""`compile_units`: each unit of a model is compiled in its place; transfers stay between the compiled graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import fx, nn

from shardwise.compilation.units.captured_graph import CapturedGraph
from shardwise.compilation.units.compiled_forward import CompiledForward
from shardwise.compilation.units.segments import SegmentCompiler
from shardwise.nn.fully_sharded import FullySharded
from shardwise.nn.fully_sharded.unit_choice import block_paths
from shardwise.nn.sharding_plan import ModuleTree

M = TypeVar("M", bound=nn.Module)


def compile_units(model: M, options: dict[str, Any]) -> M:
    """Compile each unit of a model, in place, with options of `torch.compile`.

    The units are those of `fully_shard`; of other models, the members of lists of equal modules.
    """
    compiler = _UnitCompiler(options)
    made: Any = getattr(model, "fully_sharded", None)
    if isinstance(made, FullySharded):
        for unit in made.units:
            if unit.path:
                compiler.install(unit.module, unit.is_tried)
    else:
        for module in _blocks(model):
            compiler.install(module)
    return model


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The members of lists of equal modules; a model without any as a whole."""
    tree = ModuleTree(model)
    paths = block_paths(tree)
    yield from (tree.modules[path] for path in paths or [""])


class _UnitCompiler:
    """Compiles the units of one model."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self._segments = SegmentCompiler(self.compiled)

    def install(self, module: nn.Module, is_tried: Callable[[], bool] | None = None) -> None:
        """Let a module run compiled. While ``is_tried`` gives True, nothing is compiled: other calls may follow."""
        if not isinstance(module.forward, CompiledForward):
            vars(module)["forward"] = CompiledForward(module, self, is_tried)

    def compiled(self, function: Any) -> Any:
        """A function of plain tensors."""
        return _FirstQuiet(_torch_compile(function, **self.options))

    def captured(self, forward: Any) -> Any:
        """A forward that is called with placeholders."""
        return _torch_compile(forward, backend=self._capture, fullgraph=True, dynamic=self.options.get("dynamic"))

    def _capture(self, graph: fx.GraphModule, inputs: object) -> CapturedGraph:
        return CapturedGraph(graph, self._segments)


def _torch_compile(function: Any, **options: Any) -> Any:
    """By torch itself: the function is called with plain tensors alone."""
    compile_: Any = getattr(torch.compile, "__wrapped__", torch.compile)
    return compile_(function, **options)


class _FirstQuiet:
    """A compiled function whose first call, which compiles it, warns of nothing that the tracer itself does.

    The tracer asks every tensor that it is given for its gradient, which warns for results of other graphs.
    """

    def __init__(self, compiled: Any) -> None:
        self._compiled, self._is_first = compiled, True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the function."""
        if not self._is_first:
            return self._compiled(*args, **kwargs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
            found = self._compiled(*args, **kwargs)
        self._is_first = False
        return found
