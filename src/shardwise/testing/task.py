"""`Task`: a function to call in another process, by name."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Task:
    """A module-level function by file and name, its arguments, and the caller's warning filters."""

    module: str
    file: str | None
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    warning_filters: tuple[Any, ...]
    rewritten_asserts: bool  # whether pytest has rewritten the module's asserts

    @staticmethod
    def of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Task:
        """The task; raises where other processes could not find the function."""
        name = getattr(function, "__qualname__", None)
        if name is None:
            raise TypeError(f"{function!r} is no function that other processes can find: give a module-level function")
        if "<" in name:
            raise ValueError(f"{name} is made inside another function: ranks can only call module-level functions")
        module = sys.modules.get(function.__module__)
        loader = type(getattr(module, "__loader__", None)).__name__
        file, filters = getattr(module, "__file__", None), tuple(warnings.filters)
        return Task(function.__module__, file, name, args, kwargs, filters, loader == "AssertionRewritingHook")

    def run(self) -> Any:
        """Find the function and call it."""
        found: Any = self._load()
        for part in self.name.split("."):
            found = getattr(found, part)
        function = getattr(found, "on_this_rank", found)
        with warnings.catch_warnings():
            warnings.filters[:] = self.warning_filters  # type: ignore[index] # a list, declared a sequence
            return function(*self.args, **self.kwargs)

    def _load(self) -> ModuleType:
        """The module, by name; a test module or script by its file."""
        by_name = self.module != "__main__" and not self.rewritten_asserts and _origin(self.module) == self.file
        if self.file is None or by_name:
            return importlib.import_module(self.module)
        alias = f"shardwise_task:{self.file}"
        if alias not in sys.modules:
            try:
                _import_file(alias, self.file, rewrite=self.rewritten_asserts)
            except BaseException:
                sys.modules.pop(alias, None)
                raise
        return sys.modules[alias]


def _origin(module: str) -> str | None:
    """The file of the module that this name imports."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__file__", None)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return None if spec is None else spec.origin


def _import_file(alias: str, file: str, *, rewrite: bool) -> None:
    """Execute a file as a module, with pytest's assert rewriting if asked for."""
    folder = str(Path(file).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    source = Path(file).read_bytes()
    tree = ast.parse(source, filename=file)
    if rewrite:
        from _pytest.assertion.rewrite import rewrite_asserts

        rewrite_asserts(tree, source, file)
    module = ModuleType(alias)
    module.__file__ = file
    sys.modules[alias] = module  # dataclasses and pickles look up their module during execution
    exec(compile(tree, file, "exec", dont_inherit=True), vars(module))
