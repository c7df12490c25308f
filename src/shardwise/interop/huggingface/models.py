"""Patches of transformers' and peft's models: sharded models are saved in pieces, and sharded adapters whole."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from shardwise import settings
from shardwise.errors import CheckpointError
from shardwise.interop.huggingface.saving import save_pretrained
from shardwise.patching import Function, replace_when_loaded
from shardwise.tensor import ShardedTensor, ShardedTensorBase

# Arguments without effect on a sharded model, which every rank writes.
IGNORED_OPTIONS = ("is_main_process", "safe_serialization", "save_function", "save_peft_format", "token")


def is_sharded(model: nn.Module) -> bool:
    """Whether any parameter or buffer of a module is sharded."""
    return any(isinstance(tensor, ShardedTensorBase) for tensor in (*model.parameters(), *model.buffers()))


def _save_in_pieces(theirs: Function) -> Function:
    """`PreTrainedModel.save_pretrained`; of a sharded model, every rank writes its shards."""

    @functools.wraps(theirs)
    def save(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_sharded(self) or getattr(self, "_hf_peft_config_loaded", False):
            return theirs(self, save_directory, *args, **kwargs)
        names = ("is_main_process", "state_dict", "push_to_hub", "max_shard_size", "variant")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        options = {name: given.pop(name) for name in ("state_dict", "max_shard_size") if name in given}
        for name, value in given.items():
            if name not in IGNORED_OPTIONS and value not in (None, False) and not (name == "save_original_format"):
                raise CheckpointError(
                    f"a sharded model is saved without {name}={value!r:.50}: leave it out, or call "
                    "shardwise.huggingface.save_pretrained(model, folder) on every rank, and do that with the folder"
                )
        return save_pretrained(self, save_directory, **options)

    return save


def _whole_state_dict(theirs: Function) -> Function:
    """`get_peft_model_state_dict` with whole tensors, for files of peft. Every rank calls it."""

    @functools.wraps(theirs)
    def state_dict(*args: Any, **kwargs: Any) -> Any:
        state, budget = theirs(*args, **kwargs), settings.current().gather_budget
        for name, tensor in state.items():
            if isinstance(tensor, ShardedTensor) and tensor.nbytes > budget:
                raise CheckpointError(
                    f"peft saves whole tensors, and '{name}' of {tensor.nbytes:,} bytes is beyond the gather budget of "
                    f"{budget:,}: save within shardwise.gather_budget({tensor.nbytes}), or with shardwise.save"
                )
        return {
            name: tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor
            for name, tensor in state.items()
        }

    return state_dict


replace_when_loaded("transformers.modeling_utils", "PreTrainedModel.save_pretrained", _save_in_pieces)
replace_when_loaded("peft.peft_model", "get_peft_model_state_dict", _whole_state_dict)
