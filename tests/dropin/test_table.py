"""The old system's names: all there, with the same signatures."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import pytest

from shardwise.dropin import TABLE
from shardwise.dropin.modules import ROOT, full_name
from shardwise.dropin.table import _get_or_create_logger

GONE = ("partial_tensor", "replicated_tensor")  # modules of 2022 that the installed torch has no longer
ENTRIES = [(path, name) for path, names in TABLE.items() if path not in GONE for name in names]


def old_and_ours(path: str, name: str) -> tuple[Any, Any]:
    """The same name in the installed torch and here."""
    return getattr(importlib.import_module(full_name(path)), name), TABLE[path][name]


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
    own = {member for kind in inspect.getmro(old) if kind.__module__.startswith(ROOT) for member in vars(kind)}
    for member in sorted(own):
        old_member, our_member = getattr(old, member, None), getattr(ours, member, None)
        if inspect.isroutine(old_member) and (member.startswith("_init_from") or not member.startswith("_")):
            assert our_member is not None, f"{name}.{member}"
            assert parameters(our_member) == parameters(old_member), f"{name}.{member}"


def test_the_logger_is_silent_and_the_same() -> None:
    """However often it is asked for."""
    logger = _get_or_create_logger()
    assert logger is _get_or_create_logger()
    assert len(logger.handlers) == 1


def test_what_was_removed_has_the_signatures_of_its_time() -> None:
    """The constructors of partial and replicated tensors, and what was called on them."""
    partial = TABLE["partial_tensor"]["_PartialTensor"]
    replicated = TABLE["replicated_tensor"]["ReplicatedTensor"]
    assert list(inspect.signature(partial.__new__).parameters)[1:] == ["local_shard", "process_group", "reduce_op"]
    assert list(inspect.signature(partial.reshard).parameters)[1:] == ["resharding_spec"]
    assert list(inspect.signature(replicated.__new__).parameters)[1:] == ["data", "process_group"]
    assert callable(replicated.validate)


def test_no_module_of_the_old_system_is_forgotten() -> None:
    """Each is in the table, but for what is in those that registered ops, and the old place of checkpoints."""
    root = importlib.import_module(ROOT)
    old = {module.name.removeprefix(f"{ROOT}.") for module in _modules(root)}
    assert old - set(TABLE) == {"checkpoint", "sharded_tensor.logging_handlers"}
    assert set(TABLE) - old == {"", *GONE}


# Names that old modules happen to have: handlers of ops, which a star import leaves there, and inner state.
ABSENT = {
    "sharded_tensor": {
        "ShardingSpec",  # a string there, for annotations
        "allclose",
        "constant_",
        "equal",
        "kaiming_uniform_",
        "normal_",
        "sharded_embedding",
        "sharded_embedding_bag",
        "uniform_",
    },
    "sharded_tensor.api": {
        "DEPRECATE_MSG",
        "_register_remote_shards",
        "_sharded_tensor_current_id",
        "_sharded_tensor_lock",
        "_validate_output_tensor_for_gather",
    },
    "sharded_tensor.utils": {"_raise_if_mismatch", "_validate_output_tensor_for_gather"},
    "sharded_tensor.logger": {"_get_logging_handler", "_log_handlers"},
    "sharding_spec.api": {"_CUSTOM_SHARDING_SPEC_OPS"},
    "api": {"_CURRENT_PROCESS_GROUP"},
    "_utils": {"DEPRECATE_MSG"},
}


@pytest.mark.parametrize("path", sorted(path for path, names in TABLE.items() if names and path not in GONE))
def test_no_name_of_an_old_module_is_forgotten(path: str) -> None:
    """Those that it defines, and those of its neighbours that can be imported from it."""
    module = importlib.import_module(full_name(path))
    names = {
        name
        for name, value in vars(module).items()
        if not name.startswith("__") and not inspect.ismodule(value) and name not in ("TYPE_CHECKING", "annotations")
        if not callable(value) or (getattr(value, "__module__", None) or "").startswith(ROOT)
    }
    assert names - set(TABLE[path]) <= ABSENT.get(path, set())


def _modules(package: Any) -> list[Any]:
    """Every module below a package, without the insides of those of ops, and without importing what is deprecated."""
    found = []
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        found.append(module)
        if module.ispkg and module.name.rpartition(".")[2] not in ("_ops", "chunk_sharding_spec_ops", "checkpoint"):
            found += _modules(importlib.import_module(module.name))
    return found
