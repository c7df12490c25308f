"""`compile`: each unit of a model is compiled in its place; transfers stay between the compiled graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import fx, nn

from shardwise.compilation.captured_graph import CapturedGraph
from shardwise.compilation.compiled_forward import CompiledForward
from shardwise.compilation.segments import SegmentCompiler
from shardwise.nn.fully_sharded import FullySharded
from shardwise.nn.fully_sharded.unit_choice import block_paths
from shardwise.nn.sharding_plan import ModuleTree

M = TypeVar("M", bound=nn.Module)


def compile(model: M, **options: Any) -> M:
    """Compile each unit of a model that `fully_shard` or `shard_module` has sharded, with options of `torch.compile`.

    Every rank calls it with the same options; nothing is sent. The model is changed in place, and returned: what its
    units compute is compiled, at the second call with tensors of a layout, and gives what it gave before::

        >>> model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
        >>> model = shardwise.compile(shardwise.fully_shard(model), backend="aot_eager")
        >>> batch = shardwise.from_local(torch.ones(1 + dist.get_rank(), 8))
        >>> model(batch).shape
        torch.Size([3, 8])

    The units are those of `fully_shard`; of other models, the members of lists of equal modules. A unit that runs on
    this rank's plain samples is one graph. Of a unit that runs on sharded tensors, what lies between two transfers is
    one graph of local tensors. Units that are alike share their graphs.

    A unit whose forward torch cannot trace without a break runs as before, and the modules in it are compiled instead.
    With ``fullgraph=True`` that is an `UnsupportedOpError`, which says why.
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
        self.raises = bool(options.get("fullgraph"))
        self._segments = SegmentCompiler(self.compiled)

    def install(self, module: nn.Module, is_tried: Callable[[], bool] | None = None) -> None:
        """Let a module run compiled. While ``is_tried`` gives True, nothing is compiled: other calls may follow."""
        if not isinstance(module.forward, CompiledForward):
            vars(module)["forward"] = CompiledForward(module, self, is_tried)

    def compiled(self, function: Any) -> Any:
        """A function of plain tensors."""
        return _FirstQuiet(torch.compile(function, **self.options))

    def captured(self, forward: Any) -> Any:
        """A forward that is called with stand-ins."""
        return torch.compile(forward, backend=self._capture, fullgraph=True, dynamic=self.options.get("dynamic"))

    def _capture(self, graph: fx.GraphModule, inputs: object) -> CapturedGraph:
        return CapturedGraph(graph, self._segments)


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
