"""The tensors of a model by their names and in their form in a folder of transformers.

Where a model fuses tensors that a folder keeps apart, such as experts, each tensor of the folder is a view of the
model's tensor, so that it can be written from there and read into.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardwise.errors import CheckpointError
from shardwise.tensor import ShardedTensorBase


@torch.no_grad()
def stored_tensors(model: Any) -> dict[str, Any]:
    """The tensors that transformers would write for a model; of tied names, the one that it keeps comes first."""
    state = dict(model.state_dict(keep_vars=True))
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    known = getattr(model, "all_tied_weights_keys", None)
    copies = set(known) if isinstance(known, dict) else set()
    state = dict(sorted(state.items(), key=lambda entry: entry[0] in copies))
    revert = getattr(sys.modules.get("transformers.core_model_loading"), "revert_weight_conversion", None)
    if revert is None or not hasattr(model, "config"):
        return state
    with _Views():
        return dict(revert(model, state))


class _Views(TorchFunctionMode):
    """A context in which ``contiguous()`` of a sharded tensor gives the tensor itself, so that views stay views."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or give the operand."""
        if func is torch.Tensor.contiguous and isinstance(args[0], ShardedTensorBase):
            return args[0]
        return func(*args, **(kwargs or {}))


def require_views(stored: dict[str, Any], model: Any) -> None:
    """Raise unless these tensors share memory with the model."""
    own = {memory for tensor in model.state_dict(keep_vars=True).values() for memory in _memory(tensor)}
    for name, tensor in stored.items():
        if not own.issuperset(_memory(tensor)):
            raise CheckpointError(
                f"'{name}' of the folder is no part of a tensor of {type(model).__name__} as it lies, but has to be "
                "converted: load it with from_pretrained on every rank, then shard_module"
            )


def _memory(tensor: Any) -> set[int]:
    """The addresses of a tensor's local memory."""
    here = tensor._local_tensors() if isinstance(tensor, ShardedTensorBase) else [tensor]
    return {local.untyped_storage().data_ptr() for local in here if local.numel()}
