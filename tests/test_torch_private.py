"""What is private in torch is listed in one file, and what is replaced in it and in other libraries in one page."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shardwise
from shardwise import torch_private
from shardwise.dropin.corrections import REPLACED
from shardwise.patching import patched

SOURCE = Path(shardwise.__file__).parent
FILES = {path: ast.parse(path.read_text()) for path in SOURCE.rglob("*.py") if path.name != "torch_private.py"}
LISTED = {**torch_private.NAMES, **torch_private.LATER}
WORDS = {part for path in LISTED for part in path.split(".")}
ELSEWHERE = {  # private attributes of objects that are not torch's, and of torch's options
    *("_getframe", "_exit", "_run_finalizers"),  # of Python
    *("_call_s3", "_fetch", "_get_kwargs_from_urls", "_strip_protocol"),  # of fsspec and s3fs
    *("_drop_last", "_models", "_init_weights", "_from_config"),  # of accelerate and transformers
    *("_Options", "_devices", "_threads", "_timeout"),  # of gloo's options
    *("_shard", "_forward_cls"),  # of the system that the drop-in replaces; of a node of a custom Function
}


def is_private(name: str) -> bool:
    """Whether it begins with one underscore."""
    return name.startswith("_") and not name.startswith("__")


def torch_names(tree: ast.Module) -> dict[str, str]:
    """What a file calls names of torch."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({a.asname or "torch": a.name if a.asname else "torch" for a in node.names})
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return {ours: theirs for ours, theirs in names.items() if theirs.split(".")[0] == "torch"}


def private_names(tree: ast.Module) -> Iterator[str]:
    """The private names of torch that a file uses, with the path to them."""
    names = torch_names(tree)
    yield from (theirs for theirs in names.values() if any(map(is_private, theirs.split("."))))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            parts, owner = [node.attr], node.value
            while isinstance(owner, ast.Attribute):
                parts.append(owner.attr)
                owner = owner.value
            if isinstance(owner, ast.Name) and owner.id in names:
                yield ".".join([names[owner.id], *reversed(parts)])


def test_private_names_of_torch_are_in_one_file() -> None:
    """Any path with a private part is listed, and so is each private attribute that nothing of ours has."""
    paths = {str(path.relative_to(SOURCE)): set(private_names(tree)) for path, tree in FILES.items()}
    unlisted = {file: found - LISTED.keys() for file, found in paths.items()}
    allowed = {
        "dropin/installation.py": {"torch.distributed._shard"},
        "ops/engine/decomposition.py": {"torch.nn.functional._schema"},
    }
    assert {f: names for f, names in unlisted.items() if names - allowed.get(f, set())} == {}

    ours, used = set(), {}
    for path, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                ours.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                ours.add(node.attr)
            elif isinstance(node, ast.Attribute) and is_private(node.attr):
                used[node.attr] = f"{path.relative_to(SOURCE)}:{node.lineno}"
    assert {name: place for name, place in used.items() if name not in ours | WORDS | ELSEWHERE} == {}


def test_each_private_name_that_is_listed_is_used() -> None:
    """And has a purpose."""
    assert all(LISTED.values())
    tree = ast.parse(Path(torch_private.__file__).read_text())
    assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    exported = {ast.unparse(node.targets[0]) for node in assignments if ast.unparse(node.value).startswith("_private(")}
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in FILES)))
    assert len(exported) > 40
    assert exported - words == set()


def test_a_torch_without_a_private_name_is_told_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is missing, in one error, with what it is for."""
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    monkeypatch.delattr(torch._C, "_is_key_in_tls")
    spec = importlib.util.spec_from_file_location("again", torch_private.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match="does not have") as raised:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    lines = str(raised.value).splitlines()
    assert lines[1:] == [
        "  torch._C._current_graph_task_id: tell backwards apart; -1 outside of any",
        "  torch._C._is_key_in_tls: pass settings on to the threads of a backward",
    ]
    monkeypatch.setitem(torch_private.LATER, "torch.distributed.tensor.debug._gone", "nothing")
    with pytest.raises(ImportError, match=r"torch.distributed.tensor.debug._gone: nothing"):
        torch_private.load_private("torch.distributed.tensor.debug._gone")


def test_limits_lists_every_patch() -> None:
    """Each function that is replaced, and no other."""
    page = (Path(__file__).parents[1] / "docs" / "limits.md").read_text()
    rows = [row.split("|")[1] for row in page.split("is replaced\n")[-1].splitlines() if row.startswith("| ")][1:]
    told = {word for row in rows for word in re.findall(r"`([\w.]+)`", row)}
    functions = {path.rpartition(".")[2] for path in told if "/" not in path}
    done = {*patched, *(f"{module}.{name}" for module, name, _ in REPLACED)}
    missing = {path for path in done if not any(path.endswith(f".{word}") or path == word for word in told)}
    assert missing == set()
    known = {path.rpartition(".")[2] for path in done}
    depends = {"backward", "_cuda_jiterator_compile_and_launch_kernel"}  # on torch's version and build
    others = {"jiterator", "uninstall", "peft_model"}  # words of the rows that are no functions
    assert functions - known - depends - others == set()
