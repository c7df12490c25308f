"""Functions of modules that are not loaded yet are replaced when they are, and put back."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.patching import replace_when_loaded

SOURCE = """
def told(): return "theirs"
class Kind:
    def method(self): return "theirs"
    @staticmethod
    def of_none(): return "theirs"
"""
PATHS = ("told", "Kind.method", "Kind.of_none")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that can be imported."""
    (tmp_path / "some_module.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "some_module"
    sys.modules.pop("some_module", None)


def ours(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A function of another."""
    return lambda *args: f"ours, not {theirs(*args)}"


def said(module: Any) -> set[str]:
    """What each of its functions says."""
    return {module.told(), module.Kind().method(), module.Kind.of_none()}


@pytest.mark.parametrize("loaded", [False, True], ids=["before it is loaded", "afterwards"])
def test_functions_are_replaced_and_put_back(module: str, loaded: bool) -> None:
    """Of a module and of its classes; what the module does not have is left."""
    if loaded:
        importlib.import_module(module)
    watching = len(sys.meta_path)
    undo = [replace_when_loaded(module, path, ours) for path in (*PATHS, "gone", "Gone.method", "Kind.gone")]
    assert (module in sys.modules) == loaded
    found = importlib.import_module(module)
    assert said(found) == {"ours, not theirs"}
    assert not hasattr(found, "gone")
    assert not hasattr(found.Kind, "gone")
    assert len(sys.meta_path) == watching
    for one in undo:
        one()
    assert said(found) == {"theirs"}


def test_it_can_be_called_off(module: str) -> None:
    """Before the module is loaded."""
    watching = list(sys.meta_path)
    undo = [replace_when_loaded(module, path, ours) for path in PATHS]
    for one in undo:
        one()
    assert sys.meta_path == watching
    assert said(importlib.import_module(module)) == {"theirs"}
