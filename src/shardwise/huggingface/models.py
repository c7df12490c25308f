"""What the models of transformers do when some of their parameters are sharded: they save themselves in pieces."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from shardwise.errors import CheckpointError
from shardwise.huggingface.saving import save_pretrained
from shardwise.interop.loading import Function, replace_when_loaded
from shardwise.sharded_tensor import ShardedTensorBase

MODELS = "transformers.modeling_utils"
# Arguments of theirs that are done otherwise here, or that mean nothing: every rank writes.
WITHOUT_MEANING = ("is_main_process", "safe_serialization", "save_function", "save_peft_format", "token")


def is_sharded(model: nn.Module) -> bool:
    """Whether any parameter or buffer of a module is sharded."""
    return any(isinstance(tensor, ShardedTensorBase) for tensor in (*model.parameters(), *model.buffers()))


def _saving_in_pieces(theirs: Function) -> Function:
    """`PreTrainedModel.save_pretrained`, which writes models in pieces as every rank has them."""

    @functools.wraps(theirs)
    def save(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_sharded(self) or getattr(self, "_hf_peft_config_loaded", False):
            return theirs(self, save_directory, *args, **kwargs)
        names = ("is_main_process", "state_dict", "push_to_hub", "max_shard_size", "variant")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        options = {name: given.pop(name) for name in ("state_dict", "max_shard_size") if name in given}
        for name, value in given.items():
            if name not in WITHOUT_MEANING and value not in (None, False) and not (name == "save_original_format"):
                raise CheckpointError(
                    f"a sharded model is saved without {name}={value!r:.50}: leave it out, or call "
                    "shardwise.huggingface.save_pretrained(model, folder) on every rank, and do that with the folder"
                )
        return save_pretrained(self, save_directory, **options)

    return save


replace_when_loaded(MODELS, "PreTrainedModel.save_pretrained", _saving_in_pieces)
