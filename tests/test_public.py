"""The public names, the version, the documents."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import shardwise
from shardwise import errors

ROOT = Path(__file__).parent.parent
MODULES = [m.name for m in pkgutil.walk_packages(shardwise.__path__, "shardwise.")]


def test_all_is_what_is_visible() -> None:
    """Every public name is in `__all__`, and nothing else is."""
    submodules = {name.split(".")[1] for name in MODULES}
    visible = {
        name
        for name, value in vars(shardwise).items()
        if not name.startswith("_")
        and not (isinstance(value, ModuleType) and name in submodules - set(shardwise.__all__))
    }
    assert visible == set(shardwise.__all__)
    assert sorted(shardwise.__all__) == shardwise.__all__ or sorted(shardwise.__all__, key=str.lower)


def test_every_error_is_ours_and_a_builtin() -> None:
    """And drawn in the tree at the top of its module."""
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    assert len(kinds) > 10
    for kind in kinds:
        assert issubclass(kind, errors.ShardwiseError)
        assert kind.__name__ in (errors.__doc__ or "")
        if kind is not errors.ShardwiseError:
            assert any(base.__module__ == "builtins" and base is not Exception for base in kind.__mro__[:-3])


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is_and_its_examples_work(name: str) -> None:
    """Docstrings with examples are run."""
    module = importlib.import_module(name)
    assert module.__doc__
    names = {"ShardMetadata": shardwise.ShardMetadata, "TensorProperties": shardwise.metadata.TensorProperties}
    failed, _ = doctest.testmod(module, extraglobs=names)
    assert failed == 0


def test_the_version_is_told_once() -> None:
    """In the package, the project file and the changelog."""
    assert f'version = "{shardwise.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"## {shardwise.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    "document", sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("**/*.md") if ".venv" not in path.parts)
)
def test_links_in_documents_lead_somewhere(document: str) -> None:
    """Relative links name files that are there."""
    text = (ROOT / document).read_text()
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in link:
            assert ((ROOT / document).parent / link).exists(), link
