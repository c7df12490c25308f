"""What accelerate does with a sharded model: it prepares it unwrapped, and its batches are joined.

Accelerate deals batches out to ranks and has DistributedDataParallel average the gradients. A sharded model needs no
averaging: what is computed with sharded tensors is one value for all ranks, and its gradients are whole. So each batch,
which is a rank's own, becomes a part of one sharded batch (`loaders`), and the loss is that of all of them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from shardwise.batches import mapped
from shardwise.errors import CheckpointError
from shardwise.huggingface.loaders import deals_out, note_prepared
from shardwise.huggingface.models import is_sharded
from shardwise.huggingface.saving import save_pretrained
from shardwise.interop.loading import Function, replace_when_loaded
from shardwise.sharded_tensor import ShardedTensor


def _unwrapped(theirs: Function) -> Function:
    """`Accelerator.prepare_model`, which leaves sharded models as they are: mixed precision and devices only."""

    @functools.wraps(theirs)
    def prepare(self: Any, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        note_prepared(self, model)
        return theirs(self, model, device_placement, evaluation_mode or (deals_out(self) and is_sharded(model)))

    return prepare


def _gathering(theirs: Function) -> Function:
    """Accelerate's gather of tensors, lists and dicts: a sharded tensor is over all ranks already."""

    @functools.wraps(theirs)
    def gather(tensor: Any) -> Any:
        if not any(isinstance(leaf, ShardedTensor) for leaf in pytree.tree_leaves(tensor)):
            return theirs(tensor)
        return mapped(lambda leaf: leaf.full_tensor() if isinstance(leaf, ShardedTensor) else theirs(leaf), tensor)

    return gather


def _joined_anyway(theirs: Function) -> Function:
    """`Accelerator.join_uneven_inputs`, which has nothing to do for sharded models: their batches are joined."""

    @functools.wraps(theirs)
    def join(self: Any, joinables: Any, *args: Any, **kwargs: Any) -> Any:
        plain = [one for one in joinables if not (isinstance(one, nn.Module) and is_sharded(one))]
        return theirs(self, plain, *args, **kwargs) if plain or not joinables else contextlib.nullcontext(joinables)

    return join


def _saved_by_all(theirs: Function) -> Function:
    """`Accelerator.save_model`, in which every rank writes what it has of a sharded model."""

    @functools.wraps(theirs)
    def save(
        self: Any, model: Any, save_directory: Any, max_shard_size: int | str = "10GB", *args: Any, **kwargs: Any
    ) -> Any:
        if not is_sharded(model):
            return theirs(self, model, save_directory, max_shard_size, *args, **kwargs)
        return save_pretrained(self.unwrap_model(model), save_directory, max_shard_size=max_shard_size)

    return save


def _refusing(verb: str) -> Callable[[Function], Function]:
    """`Accelerator.save_state` or `load_state`, which would keep one rank's shards for all."""

    def make(theirs: Function) -> Function:
        @functools.wraps(theirs)
        def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
            if any(is_sharded(model) for model in self._models):
                raise CheckpointError(
                    f"accelerate's {verb}_state has one rank speak for all, and a sharded model is on many: call "
                    f'shardwise.{verb}({{"model": model, "optimizer": optimizer.optimizer}}, folder) on every rank'
                )
            return theirs(self, *args, **kwargs)

        return refuse

    return make


replace_when_loaded("accelerate.accelerator", "Accelerator.prepare_model", _unwrapped)
replace_when_loaded("accelerate.accelerator", "Accelerator.join_uneven_inputs", _joined_anyway)
replace_when_loaded("accelerate.accelerator", "Accelerator.save_model", _saved_by_all)
replace_when_loaded("accelerate.accelerator", "Accelerator.save_state", _refusing("save"))
replace_when_loaded("accelerate.accelerator", "Accelerator.load_state", _refusing("load"))
replace_when_loaded("accelerate.utils.operations", "_gpu_gather", _gathering)
