"""`compile_units`: each unit of a model is compiled in its place; transfers stay between the compiled graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import fx, nn

from shardwise.compilation.full_graph.backends import backend_of
from shardwise.compilation.units.backwards import Backwards, without_donated_buffers
from shardwise.compilation.units.captured_graph import capture_graph
from shardwise.compilation.units.compiled_forward import CompiledForward, Hooks
from shardwise.compilation.units.own_code import bound, code_of, forget_with, traced_call, with_code
from shardwise.compilation.units.segments import SegmentCompiler
from shardwise.nn.fully_sharded import FullySharded
from shardwise.nn.fully_sharded.unit_choice import block_paths
from shardwise.nn.sharding_plan import ModuleTree

M = TypeVar("M", bound=nn.Module)


def compile_units(model: M, options: dict[str, Any]) -> M:
    """Compile each unit of a model, in place, with options of `torch.compile`. Units that are compiled are so anew.

    The units are those of `fully_shard`; of other models, the members of lists of equal modules.
    """
    compiler = _UnitCompiler(options)
    for module in model.modules():
        if isinstance(module.forward, CompiledForward):
            module.forward.remove()
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
        self._options, self._compile, self._dynamic = options, _Compile(options), options.get("dynamic")
        self._next: tuple[int, _UnitCompiler] | None = None
        self.backwards = Backwards()
        self.segments = SegmentCompiler(self._compile, self.backwards)
        self._own: dict[Any, Any] = {}  # functions and code

    def install(self, module: nn.Module, is_tried: Callable[[], bool] | None = None) -> None:
        """Let a module run compiled. While ``is_tried`` gives True, nothing is compiled: other calls may follow."""
        if not isinstance(module.forward, CompiledForward):
            vars(module)["forward"] = CompiledForward(module, self, is_tried)

    def compiled(self, forward: Any, hooks: Hooks) -> Any:
        """A forward that is called with plain tensors, of a module with these hooks within."""
        function = getattr(forward, "__func__", forward)
        if isinstance(function, FunctionType):
            function = with_code(function, self._kept("plain", forward, hooks, lambda: function.__code__.replace()))
        return self._compile(bound(function, forward))

    def captured(self, forward: Any, hooks: Hooks) -> Any:
        """A forward that is called with placeholders."""
        own = self._kept("traced", forward, hooks, lambda: traced_call(forward))
        traced = _torch_compile(own, backend=capture_graph, fullgraph=True, dynamic=self._dynamic)
        return lambda *args, **kwargs: traced(forward, args, kwargs)

    def in_epoch(self, epoch: int) -> _UnitCompiler:
        """A compiler that compiles in the same way and has compiled nothing yet; one for all who ask for an epoch."""
        if self._next is None or self._next[0] != epoch:
            self._next = epoch, _UnitCompiler(self._options)
        return self._next[1]

    def _kept(self, way: str, forward: Any, hooks: Hooks, make: Callable[[], Any]) -> Any:
        """A function, or code, that is this compiler's own: the same for all forwards that have the same code."""
        key = way, code_of(forward), hooks
        if key not in self._own:
            made = self._own[key] = make()
            forget_with(self, getattr(made, "__code__", made))
        return self._own[key]


class _Compile:
    """Compiles functions of plain tensors with the same options of `torch.compile`."""

    def __init__(self, options: dict[str, Any]) -> None:
        names = ("backend", "mode", "options")
        chosen = {name: options[name] for name in names if options.get(name) is not None}
        self._backend = _Backend(backend_of(**chosen, dynamic=False))  # torch's tracer finds sizes
        self._options = {name: value for name, value in options.items() if name not in names}

    def __call__(self, function: Any) -> Any:
        """The compiled function."""
        return _FirstQuiet(_torch_compile(function, backend=self._backend, **self._options))


class _Backend:
    """A backend of `torch.compile`, whose graphs may go through several backwards."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend = backend

    def __call__(self, graph: fx.GraphModule, inputs: Any) -> Any:
        """The compiled graph."""
        with without_donated_buffers():
            return self._backend(graph, inputs)


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
