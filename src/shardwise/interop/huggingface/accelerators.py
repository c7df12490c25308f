"""Patches of accelerate: a sharded model is prepared without a wrapper, and the batches of all ranks are joined.

Accelerate gives each rank its own batches, and DistributedDataParallel averages the gradients. A sharded model needs no
averaging: results are one value for all ranks, with whole gradients. So the batches of all ranks become one sharded
batch (`loaders`), and the loss is that of all of them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from shardwise.errors import CheckpointError
from shardwise.interop.huggingface.loaders import distributes_batches, note_prepared
from shardwise.interop.huggingface.models import is_sharded
from shardwise.interop.huggingface.saving import save_pretrained
from shardwise.patching import Function, replace_when_loaded
from shardwise.tensor import ShardedTensor
from shardwise.tensor.batch_forms import map_nest
from shardwise.torch_private import pytree


def _prepare_unwrapped(theirs: Function) -> Function:
    """`Accelerator.prepare_model`; a sharded model gets mixed precision and its device, but no wrapper."""

    @functools.wraps(theirs)
    def prepare(self: Any, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        note_prepared(self, model)
        return theirs(
            self, model, device_placement, evaluation_mode or (distributes_batches(self) and is_sharded(model))
        )

    return prepare


def _gather_sharded(theirs: Function) -> Function:
    """Accelerate's gather of tensors, lists and dicts; a sharded tensor becomes its full tensor."""

    @functools.wraps(theirs)
    def gather(tensor: Any) -> Any:
        if not any(isinstance(leaf, ShardedTensor) for leaf in pytree.tree_leaves(tensor)):
            return theirs(tensor)
        return map_nest(lambda leaf, _: leaf.full_tensor() if isinstance(leaf, ShardedTensor) else theirs(leaf), tensor)

    return gather


def _join_plain_models(theirs: Function) -> Function:
    """`Accelerator.join_uneven_inputs` without sharded models, whose batches are joined anyway."""

    @functools.wraps(theirs)
    def join(self: Any, joinables: Any, *args: Any, **kwargs: Any) -> Any:
        plain = [one for one in joinables if not (isinstance(one, nn.Module) and is_sharded(one))]
        return theirs(self, plain, *args, **kwargs) if plain or not joinables else contextlib.nullcontext(joinables)

    return join


def _save_by_all(theirs: Function) -> Function:
    """`Accelerator.save_model`; of a sharded model, every rank writes its shards."""

    @functools.wraps(theirs)
    def save(
        self: Any, model: Any, save_directory: Any, max_shard_size: int | str = "10GB", *args: Any, **kwargs: Any
    ) -> Any:
        if not is_sharded(model):
            return theirs(self, model, save_directory, max_shard_size, *args, **kwargs)
        return save_pretrained(self.unwrap_model(model), save_directory, max_shard_size=max_shard_size)

    return save


def _refuse_state(verb: str) -> Callable[[Function], Function]:
    """`Accelerator.save_state` or `load_state`, refused for sharded models: one rank would write for all."""

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


replace_when_loaded("accelerate.accelerator", "Accelerator.prepare_model", _prepare_unwrapped)
replace_when_loaded("accelerate.accelerator", "Accelerator.join_uneven_inputs", _join_plain_models)
replace_when_loaded("accelerate.accelerator", "Accelerator.save_model", _save_by_all)
replace_when_loaded("accelerate.accelerator", "Accelerator.save_state", _refuse_state("save"))
replace_when_loaded("accelerate.accelerator", "Accelerator.load_state", _refuse_state("load"))
replace_when_loaded("accelerate.utils.operations", "_gpu_gather", _gather_sharded)
