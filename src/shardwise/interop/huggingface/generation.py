"""Patch of transformers' `generate`: the words of a sharded model are plain, and the same on every rank.

What `generate` keeps between two words (ids, masks, scores) is made of the ids that it is given and of the logits. Both
come to it as plain tensors. So the loop computes on plain tensors, as it does for a plain model, and one gather of the
logits a word is all that it adds. Caches of keys and values are within the model, and stay sharded.

A word has few activations, for which messages take longer than their bytes. So small sums over what is cut go to every
rank in one message, instead of in one that leaves them in chunks and another that gathers them. Between blocks, such as
attentions and MLPs, small activations are whole, and plain: norms and sums of residuals cost what they cost elsewhere.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from shardwise import settings
from shardwise.autograd.transfers import Way, moved_tensors
from shardwise.comm.transfer import make_plan
from shardwise.interop.huggingface.models import is_sharded
from shardwise.layout import Layout
from shardwise.ops.engine.compute import group_places
from shardwise.ops.engine.gathered import is_fully_replicated
from shardwise.patching import Function, replace_when_loaded
from shardwise.tensor import ShardedTensor, ShardedTensorBase

SMALL = 2**16  # bytes of an activation that travels as fast as a message without bytes


def _whole(tensor: ShardedTensor) -> torch.Tensor:
    """All of a tensor, as a plain one. As an op, it sends data only, and no header before it."""
    if is_fully_replicated(tensor):
        return tensor.local_tensor()
    group = tensor._process_group
    plan = make_plan(tensor._layout, Layout.whole(tensor.shape, group_places(tensor._layout, group)))
    with torch.no_grad():
        return moved_tensors(tensor, plan, Way(group))[0][0]


def _whole_logits(model: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook: the output of a model, with plain logits. With `logits_to_keep`, they are of one position."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, ShardedTensor):
        output["logits"] = _whole(logits)
    return output


def _whole_output(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook: an output that is on every rank already, as a plain tensor."""
    return _whole(output) if isinstance(output, ShardedTensor) and is_fully_replicated(output) else output


def _whole_if_small(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook of tables and blocks: a small output, or the first of several, as a plain tensor."""
    if isinstance(output, tuple) and output:
        return (_whole_if_small(module, args, output[0]), *output[1:])
    return _whole(output) if isinstance(output, ShardedTensor) and output.nbytes <= SMALL else output


def _hooked(model: nn.Module) -> list[Any]:
    """Hooks for one call of `generate`.

    What a single layer gives stays as it is cut, such as keys and values by heads. A block of several layers, such as
    an attention or an MLP, gives its output whole: norms and the next block need all of it.
    """
    hooks = [model.register_forward_hook(_whole_logits)]
    for module in model.modules():
        matrices = sum(isinstance(one, ShardedTensorBase) and one.ndim > 1 for one in module.parameters())
        is_table = matrices and isinstance(module, nn.Embedding)
        if is_table or (matrices > 1 and module is not model):
            hooks.append(module.register_forward_hook(_whole_if_small))
        elif matrices:
            hooks.append(module.register_forward_hook(_whole_output))
    return hooks


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
        hooks = _hooked(self)
        try:
            with settings.changed(whole_sums=SMALL):
                return theirs(self, *args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    return generate


replace_when_loaded("transformers.generation.utils", "GenerationMixin.generate", _generate_plain_words)
