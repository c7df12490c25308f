"""In a process that has not imported the old system, its imports give shardwise; in one that has, there is an error."""

from __future__ import annotations

import subprocess
import sys


def in_a_new_process(code: str) -> str:
    """Run code in a fresh interpreter, where nothing of the old system is imported."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_installed_it_is_what_the_old_imports_give() -> None:
    """Every path and name of the table, in a process that has not imported the old system."""
    printed = in_a_new_process("""
import shardwise.dropin, importlib, sys
from shardwise.dropin.modules import full_name
shardwise.dropin.install()
shardwise.dropin.install()
from torch.distributed._shard.sharded_tensor import ShardedTensor, zeros
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
import torch.distributed._shard.sharded_tensor.api as api
import torch
assert ShardedTensor is shardwise.ShardedTensor is api.ShardedTensor
assert torch.distributed._shard.sharding_spec.ChunkShardingSpec is ChunkShardingSpec
for path, names in shardwise.dropin.TABLE.items():
    module = importlib.import_module(full_name(path))
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
import importlib.util, torch.distributed._sharded_tensor
import torch.distributed._shard.sharding_spec.chunk_sharding_spec_ops  # registered ops, which are there
assert importlib.util.find_spec("torch.distributed._shard.sharded_tensor").loader is not None
assert importlib.reload(torch.distributed._shard) is torch.distributed._shard
assert torch.distributed._shard.sharded_tensor.ShardedTensor is ShardedTensor
try:
    import torch.distributed._shard.sharded_tensor._ops.binary_cmp
except ModuleNotFoundError as error:
    print(error)
import os, torch.distributed._state_dict_utils as user
from shardwise.dropin.children import STARTUP
assert os.environ["PYTHONPATH"].split(os.pathsep).count(STARTUP) == 1
assert user._all_gather_sharded_tensor.__module__ == "shardwise.dropin.corrections"
shardwise.dropin.uninstall()
shardwise.dropin.uninstall()
assert not shardwise.dropin.is_installed()
assert STARTUP not in os.environ.get("PYTHONPATH", "")
assert "torch.distributed._sharded_tensor" not in sys.modules and not hasattr(torch.distributed, "_sharded_tensor")
assert user._all_gather_sharded_tensor.__module__ == "torch.distributed._state_dict_utils"
shardwise.dropin.install(for_children=False)
assert STARTUP not in os.environ.get("PYTHONPATH", "")
shardwise.dropin.uninstall()
from torch.distributed._shard.sharded_tensor import ShardedTensor as Theirs
assert Theirs is not ShardedTensor and Theirs.__module__.startswith("torch.")
""")
    assert "cannot import name 'nonsense'" in printed
    assert "shardwise stands in for it" in printed
    assert "no module named 'torch.distributed._shard.sharded_tensor._ops.binary_cmp': shardwise stands in" in printed


def test_too_late_is_an_error_that_names_who_was_first() -> None:
    """Those outside torch before those of torch; and what to do. Nothing is changed."""
    printed = in_a_new_process("""
import os, sys, torch.distributed._state_dict_utils, shardwise.dropin
before = dict(os.environ), set(sys.modules)
for _ in range(2):
    try:
        shardwise.dropin.install()
    except RuntimeError as error:
        print(error)
    from torch.distributed._shard.metadata import ShardMetadata
assert before == (dict(os.environ), set(sys.modules)) and not shardwise.dropin.is_installed()
""")
    first, second = printed.splitlines()
    assert "is already imported in this process, by torch.distributed._state_dict_utils: " in first
    assert "is already imported in this process, by __main__, torch.distributed._state_dict_utils: " in second
    assert "call shardwise.dropin.install() before importing them, or start the program with `python -m" in first


def test_importing_shardwise_imports_nothing_of_the_old_system() -> None:
    """It stands on its own."""
    code = "import shardwise, sys; print([m for m in sys.modules if m.startswith('torch.distributed._shard')])"
    assert in_a_new_process(code).strip() == "[]"
