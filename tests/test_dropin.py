"""The old system's names: all there, with the same signatures, and importable from the old paths."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from typing import Any

import pytest

from shardwise import dropin

ENTRIES = [(path, name) for path, names in dropin.TABLE.items() for name in names]


def in_a_new_process(code: str) -> str:
    """Run code in a fresh interpreter, where nothing of the old system is imported."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def old_and_ours(path: str, name: str) -> tuple[Any, Any]:
    """The same name in the installed torch and here."""
    return getattr(importlib.import_module(dropin._full_name(path)), name), dropin.TABLE[path][name]


def parameters(function: Any) -> list[tuple[str, Any]]:
    """Names and kinds, in order; a constructor of options alone is opened up by the old system's `__init__`."""
    if inspect.isclass(function) and issubclass(function, importlib.import_module("torch").Tensor):
        target = function.__init__ if "shardwise" not in function.__module__ else function.__new__
        return [(p.name, p.kind) for p in list(inspect.signature(target).parameters.values())[1:]]
    found = [(p.name, p.kind) for p in inspect.signature(inspect.unwrap(function)).parameters.values()]
    return [parameter for parameter in found if parameter[0] not in ("self", "cls")]


@pytest.mark.parametrize(("path", "name"), [e for e in ENTRIES if e[1] != "ShardedTensorBase"])
def test_every_name_has_the_old_signature(path: str, name: str) -> None:
    """Parameter names, their order and kind, and plain defaults."""
    old, ours = old_and_ours(path, name)
    assert callable(old) == callable(ours)
    if not callable(old):
        assert type(old) is type(ours)
        return
    assert parameters(ours) == parameters(old)
    if not inspect.isclass(old):
        defaults = {p.name: p.default for p in inspect.signature(old).parameters.values()}
        assert {p.name: p.default for p in inspect.signature(ours).parameters.values()} == defaults


@pytest.mark.parametrize(("path", "name"), ENTRIES)
def test_every_class_has_the_old_methods(path: str, name: str) -> None:
    """Public ones, and the private constructors that others call, with the old parameters."""
    old, ours = old_and_ours(path, name)
    if not inspect.isclass(old):
        return
    own = {member for kind in inspect.getmro(old) if kind.__module__.startswith(dropin.ROOT) for member in vars(kind)}
    for member in sorted(own):
        old_member, our_member = getattr(old, member, None), getattr(ours, member, None)
        if inspect.isroutine(old_member) and (member.startswith("_init_from") or not member.startswith("_")):
            assert our_member is not None, f"{name}.{member}"
            assert parameters(our_member) == parameters(old_member), f"{name}.{member}"


def test_installed_it_is_what_the_old_imports_give() -> None:
    """Every path and name of the table, in a process that has not imported the old system."""
    printed = in_a_new_process("""
import shardwise.dropin, importlib, sys
shardwise.dropin.install()
shardwise.dropin.install()
from torch.distributed._shard.sharded_tensor import ShardedTensor, zeros
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
import torch.distributed._shard.sharded_tensor.api as api
import torch
assert ShardedTensor is shardwise.ShardedTensor is api.ShardedTensor
assert torch.distributed._shard.sharding_spec.ChunkShardingSpec is ChunkShardingSpec
for path, names in shardwise.dropin.TABLE.items():
    module = importlib.import_module(shardwise.dropin._full_name(path))
    for name, value in names.items():
        assert getattr(module, name) is value
try:
    from torch.distributed._shard.sharded_tensor import nonsense
except ImportError as error:
    print(error)
try:
    api.nonsense
except AttributeError as error:
    print(error)
shardwise.dropin.uninstall()
from torch.distributed._shard.sharded_tensor import ShardedTensor as Theirs
assert Theirs is not ShardedTensor and Theirs.__module__.startswith("torch.")
""")
    assert "cannot import name 'nonsense'" in printed
    assert "shardwise stands in for it" in printed


def test_too_late_is_an_error_that_names_who_was_first() -> None:
    """And what to do."""
    printed = in_a_new_process("""
import torch.distributed.checkpoint, shardwise.dropin
try:
    shardwise.dropin.install()
except RuntimeError as error:
    print(error)
""")
    assert "is already imported in this process, by torch.distributed" in printed
    assert "call shardwise.dropin.install() before importing them" in printed


def test_importing_shardwise_imports_nothing_of_the_old_system() -> None:
    """It stands on its own."""
    code = "import shardwise, sys; print([m for m in sys.modules if m.startswith('torch.distributed._shard')])"
    assert in_a_new_process(code).strip() == "[]"


def test_the_logger_is_silent_and_the_same() -> None:
    """However often it is asked for."""
    logger = dropin._get_or_create_logger()
    assert logger is dropin._get_or_create_logger()
    assert len(logger.handlers) == 1
