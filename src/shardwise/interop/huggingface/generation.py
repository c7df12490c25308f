"""Patch of transformers' `generate`: the words of a sharded model are plain, and the same on every rank.

What `generate` keeps between two words (ids, masks, scores) is made of the ids that it is given and of the logits. Both
come to it as plain tensors. So the loop computes on plain tensors, as it does for a plain model, and one gather of the
logits a word is all that it adds. Caches of keys and values are within the model, and stay sharded.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from shardwise.interop.huggingface.models import is_sharded
from shardwise.patching import Function, replace_when_loaded
from shardwise.tensor import ShardedTensor


def _whole_logits(model: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook: the output of a model, with plain logits. With `logits_to_keep`, they are of one position."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, ShardedTensor):
        with torch.no_grad():
            output["logits"] = logits.full_tensor()
    return output


def _whole_ids(value: Any) -> Any:
    """Ids and masks whole, for words are added to them. Other inputs, such as images, stay as they are."""
    if isinstance(value, ShardedTensor) and not value.is_floating_point():
        return value.full_tensor()
    return value


def _generate_plain_words(theirs: Function) -> Function:
    """`GenerationMixin.generate`; with a sharded model, every rank calls it, and gets the words of all."""

    @functools.wraps(theirs)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_sharded(self):
            return theirs(self, *args, **kwargs)
        args = tuple(_whole_ids(value) for value in args)
        kwargs = {name: _whole_ids(value) for name, value in kwargs.items()}
        hook = self.register_forward_hook(_whole_logits)
        try:
            return theirs(self, *args, **kwargs)
        finally:
            hook.remove()

    return generate


replace_when_loaded("transformers.generation.utils", "GenerationMixin.generate", _generate_plain_words)
