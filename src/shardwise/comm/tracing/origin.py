"""Where in a program a call comes from: its line, the op, the module, and what a backward is the backward of."""

from __future__ import annotations

import functools
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from shardwise.comm.group.call_history import GENERATED
from shardwise.comm.tracing.events import Origin
from shardwise.torch_private import current_backward, current_node, next_node_number, run_backward

_PACKAGE = Path(__file__).parents[2]
_LIBRARIES = f"{Path(torch.__file__).parent}/", f"{_PACKAGE}/"
_TESTING = f"{_PACKAGE}/testing/"
_STANDARD = str(Path(threading.__file__).parent) + "/"
_OF_INDUCTOR = "/torchinductor_"  # in the path of the folder where its code is
_ENGINE = run_backward.__code__  # through which every backward is begun


OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")


@functools.lru_cache(maxsize=4096)
def _is_of_library(file: str) -> bool:
    """Whether this is code of torch, of this library, or of Python itself, or code that torch has generated."""
    if file.startswith((*_LIBRARIES, "<frozen", GENERATED)) or _OF_INDUCTOR in file:
        return True
    return file.startswith(_STANDARD) and "site-packages" not in file


@functools.lru_cache(maxsize=4096)
def _verb(code: CodeType) -> str | None:
    """The name of a function of this library that users call, else empty; None if it is of the pool of ranks."""
    if code.co_filename.startswith(_TESTING):
        return None
    is_public = code.co_filename.startswith(_LIBRARIES[1]) and not code.co_name.startswith(("<", "_"))
    return code.co_name if is_public else ""


class Caller(NamedTuple):
    """The first caller outside of libraries."""

    place: str  # its line
    verb: str  # the function of this library that it called
    runs_backward: bool  # whether what it called was a backward, which then called the library


def caller() -> Caller:
    """Who has called this library, from this thread."""
    frame: FrameType | None = sys._getframe(1)
    verb, runs_backward = "", False
    while frame is not None:
        code = frame.f_code
        if not _is_of_library(code.co_filename):
            return Caller(_line(code, frame.f_lineno), verb, runs_backward)
        name = _verb(code)
        if name is None:  # the pool of ranks, which calls everything there is
            break
        verb = name or verb
        runs_backward |= code is _ENGINE
        frame = frame.f_back
    return Caller("", verb, True)


def place_of(traceback: TracebackType | None) -> str:
    """The last line outside of libraries that an error has come through."""
    found = ""
    while traceback is not None:
        frame = traceback.tb_frame
        if not _is_of_library(frame.f_code.co_filename):
            found = _line(frame.f_code, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


@functools.lru_cache(maxsize=4096)
def _line(code: CodeType, number: int) -> str:
    names = [name for name in code.co_qualname.split(".") if not name.startswith("<")]  # not of lambdas and the like
    inside = f" in {names[-1]}" if names else ""
    return f"{Path(code.co_filename).name}:{number}{inside}"


def name_of(op: Any) -> str:
    """As a user knows it: a property's getter is named after the property, an operator after what it does."""
    name = str(getattr(op, "__name__", op))
    if name in ("__get__", "__set__"):
        return str(getattr(getattr(op, "__self__", None), "__name__", name))
    if not name.startswith("__"):
        return name
    name = name.strip("_")
    turned, in_place = (name[0] == letter and name[1:] in OPERATORS for letter in "ri")
    return name[1:] + "_" * in_place if turned or in_place else name


class Running(threading.local):
    """Of one thread: the ops that have been entered and not left, innermost last, each with its backward if in one."""

    def __init__(self) -> None:
        self.ops: list[tuple[Origin, int]] = []
        self.modules: list[tuple[Any, str]] = []


class Origins:
    """Knows for every moment what is being computed, and for every node of autograd which call it is of."""

    def __init__(self) -> None:
        self._running = Running()
        self._nodes: dict[int, Origin] = {}  # by the number that torch gives to nodes in order
        self._names: tuple[Any, dict[int, str]] = (None, {})
        self.weights: dict[str, int] = {}  # bytes of the parameters of each module that ran, without its children's
        self.kinds: dict[str, str] = {}  # the class of each module that ran

    def enter(self, op: Any) -> tuple[Origin, int]:
        """An op begins. Leave with what this gives.

        Within another op, it is that one that is being computed: what ops come down to is worked out once only.
        """
        ops, task = self._running.ops, current_backward()
        inner = bool(ops) and ops[-1][1] == task
        origin = ops[-1][0] if inner else Origin(name_of(op), caller().place, self._module())
        ops.append((origin, task))
        return origin, next_node_number()

    def leave(self, origin: Origin, first_node: int) -> None:
        """It ends: what autograd has recorded meanwhile, and no op within it has taken, is of this op."""
        self._running.ops.pop()
        for number in range(first_node, next_node_number()):
            self._nodes.setdefault(number, origin)

    def here(self) -> Origin:
        """What is being computed in this thread; of a backward, the call that it is the backward of."""
        running, task = self._running, current_backward()
        if running.ops and running.ops[-1][1] == task:
            return running.ops[-1][0]
        node, by = current_node(), caller()
        if node is None and (task != -1 or by.runs_backward):  # at the end of a backward
            return Origin("gradients of leaves", by.place, "")
        if node is None or not by.runs_backward:  # a verb: if it is recorded, it has just been, as the last node
            origin = Origin(by.verb, by.place, self._module())
            self._nodes.setdefault(next_node_number() - 1, origin)
            return origin
        found = self._nodes.get(node._sequence_nr())
        if found is None:
            return Origin("backward", by.place, self._module())
        return Origin(f"backward of {found.op}", found.place, found.module)

    # Modules --------------------------------------------------------------------------------------------------------

    def watch_modules(self) -> list[Any]:
        """From now on, know which module is running. Gives handles to remove."""
        return [
            register_module_forward_pre_hook(lambda module, args: self._begin(module)),
            register_module_forward_hook(lambda module, args, out: self._end(module), always_call=True),
        ]

    def _begin(self, module: Any) -> None:
        running = self._running.modules
        if not running and id(module) not in self._names[1]:  # a part of the model may be called alone, to recompute
            self._names = module, {id(one): name for name, one in module.named_modules()}
        kind = type(module).__name__
        name = self._names[1].get(id(module), kind) or kind
        running.append((module, name))
        self.kinds[name] = kind
        self.weights[name] = sum(one.nbytes for one in module._parameters.values() if one is not None)

    def _end(self, module: Any) -> None:
        running = self._running.modules
        while running and running.pop()[0] is not module:
            pass

    def _module(self) -> str:
        running = self._running.modules
        return running[-1][1] if running else ""
