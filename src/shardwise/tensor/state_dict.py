"""Hooks that let a module's state dict hold sharded tensors that are plain attributes, not parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from shardwise.tensor.tensor import ShardedTensor


def state_dict_hook(module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Add every sharded tensor attribute to the state dict. For `Module._register_state_dict_hook`."""
    for owner, name, key in _attributes(module, prefix):
        value = vars(owner)[name]
        if isinstance(value, ShardedTensor):
            destination[key] = value


def pre_load_state_dict_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Set every attribute for which the state dict holds a sharded tensor.

    For `Module._register_load_state_dict_pre_hook`, with ``with_module=True``.
    """
    for owner, name, key in list(_attributes(module, prefix)):
        if isinstance(state_dict.get(key), ShardedTensor):
            setattr(owner, name, state_dict.pop(key))  # popped, so that strict loading does not report it as unexpected


def _attributes(module: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, str, str]]:
    """Each plain attribute of the module tree: its owner, its name, and its key in a state dict."""
    for path, owner in module.named_modules():
        stem = prefix + path
        for name in list(vars(owner)):
            yield owner, name, f"{stem}.{name}" if stem and not stem.endswith(".") else f"{stem}{name}"
