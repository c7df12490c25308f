"""The public names, the version, the documents."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import errors
from shardwise.tensor.dispatch import registry
from shardwise.testing import ranks

ROOT = Path(__file__).parent.parent
OPTIONAL = {  # modules, and their needs
    "shardwise.comm.transfer.copy_kernel": "triton",
    "shardwise.interop.lightning.strategy": "lightning",
    "shardwise.lightning": "lightning",
}
MODULES = [
    m.name
    for m in pkgutil.walk_packages(shardwise.__path__, "shardwise.")
    if m.name not in OPTIONAL or find_spec(OPTIONAL[m.name])
]


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
    assert sorted(shardwise.__all__) == shardwise.__all__


PUBLIC_VERBS = {"load"}  # shardwise.huggingface.load is named after shardwise.load: both read what save has written


def test_a_name_has_one_concept() -> None:
    """No class or public function has its name in two folders."""
    folders: dict[str, set[Path]] = {}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                folders.setdefault(node.name, set()).add(path.parent)
    assert {name for name, each in folders.items() if len(each) > 1} == PUBLIC_VERBS


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
    names = {"ShardMetadata": shardwise.ShardMetadata, "TensorProperties": shardwise.layout.metadata.TensorProperties}
    for found in doctest.DocTestFinder().find(module, extraglobs=names):
        if not _wants_ranks(found):
            assert doctest.DocTestRunner().run(found).failed == 0


def _wants_ranks(found: doctest.DocTest) -> bool:
    """Whether the examples speak of the library and do not import it: they are for ranks of a job."""
    source = "".join(example.source for example in found.examples)
    return "shardwise." in source and "import" not in source


@ranks(2)
def test_examples_of_public_names_work_on_ranks() -> None:
    """As they stand in the docstrings, on each of two ranks alike."""
    names = {"shardwise": shardwise, "torch": torch, "dist": dist}
    modules = [importlib.import_module(name) for name in MODULES]
    wanted = [found for module in modules for found in doctest.DocTestFinder().find(module, globs=dict(names))]
    wanted = [found for found in wanted if _wants_ranks(found)]
    assert len(wanted) > 15
    for found in sorted(wanted, key=lambda one: one.name):
        said: list[str] = []
        assert doctest.DocTestRunner().run(found, out=said.append).failed == 0, "".join(said)
    registry.overrides.pop(torch.special.gammaincc)


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


def test_other_names_are_unknown() -> None:
    """As in any module."""
    with pytest.raises(AttributeError, match="no attribute 'sharded'"):
        shardwise.sharded  # noqa: B018
    assert len(shardwise.__all__) <= 50


@pytest.mark.parametrize("name", shardwise.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    """It says what it gives and, unless it is a module or the base of errors, shows it by an example that is run."""
    value = getattr(shardwise, name)
    documented = inspect.getdoc(value)
    assert documented
    assert ">>>" in documented or isinstance(value, ModuleType) or value is errors.ShardwiseError
