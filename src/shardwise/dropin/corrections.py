"""Patches of two functions of torch outside the old system, while the drop-in is installed.

`_all_gather_sharded_tensor` gathers tensors for a full state dict, and assumes even chunks of the first dim.
`_flatten_sharded_tensors` prepares a state for a checkpoint, and drops tensors without local shards, which a load then
takes for an old format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup

from shardwise.patching import Function, replace_when_loaded
from shardwise.tensor import ShardedTensor
from shardwise.torch_private import load_private


def gathering(theirs: Function) -> Callable[..., torch.Tensor]:
    """Gathers a sharded tensor of any layout for a full state dict."""

    def gathered(
        sharded_tensor: ShardedTensor, pg: ProcessGroup | None = None, device: torch.device | None = None
    ) -> torch.Tensor:
        """The whole tensor on every rank of its group. Every rank calls this."""
        whole = sharded_tensor.full_tensor().detach()
        return whole if device is None else whole.to(device)

    return gathered


def flattening(theirs: Function) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Prepares a state for a checkpoint, and keeps tensors without local shards."""

    def flattened(state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state, with nested sharded tensors flattened."""
        set_element = load_private("torch.distributed.checkpoint._traverse.set_element")
        traverse = load_private("torch.distributed.checkpoint._traverse.traverse_state_dict")
        state: dict[str, Any] = theirs(state_dict)

        def keep(path: Any, value: object) -> None:
            if isinstance(value, ShardedTensor) and not value._frame.rows:
                set_element(state, path, value)

        traverse(state_dict, keep)
        return state

    return flattened


# The module, the function, and what makes our function from torch's.
REPLACED: list[tuple[str, str, Callable[[Function], Function]]] = [
    ("torch.distributed._state_dict_utils", "_all_gather_sharded_tensor", gathering),
    ("torch.distributed.checkpoint._sharded_tensor_utils", "_flatten_sharded_tensors", flattening),
]
_undoing: list[Callable[[], None]] = []  # called by `stop`


def start() -> None:
    """Patch the functions, now or when their modules are loaded."""
    for module, name, make in REPLACED:
        _undoing.append(replace_when_loaded(module, name, make))


def stop() -> None:
    """Undo the patches."""
    while _undoing:
        _undoing.pop()()
