"""What accelerate does with a sharded model: it prepares it unwrapped, and its batches are joined.

Accelerate deals batches out to ranks and has DistributedDataParallel average the gradients. A sharded model needs no
averaging: what is computed with sharded tensors is one value for all ranks, and its gradients are whole. So each batch,
which is a rank's own, becomes a part of one sharded batch by `from_local`, and the loss is that of all of them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree

from shardwise.dispatch import Distributed
from shardwise.errors import CheckpointError
from shardwise.huggingface.models import is_sharded
from shardwise.huggingface.saving import save_pretrained
from shardwise.interop.loading import Function, replace_when_loaded
from shardwise.sharded_tensor import ShardedTensor, from_local

OWNER = "_shardwise_accelerator"  # on a prepared loader: who prepared it


def _unwrapped(theirs: Function) -> Function:
    """`Accelerator.prepare_model`, which leaves sharded models as they are: mixed precision and devices only."""

    @functools.wraps(theirs)
    def prepare(self: Any, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        return theirs(self, model, device_placement, evaluation_mode or (_deals_out(self) and is_sharded(model)))

    return prepare


def _owned(theirs: Function) -> Function:
    """`Accelerator.prepare_data_loader`, whose loaders know who prepared them."""

    @functools.wraps(theirs)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        loader = theirs(self, *args, **kwargs)
        setattr(loader, OWNER, weakref.ref(self))
        return loader

    return prepare


def _joining(theirs: Function) -> Function:
    """The iterator of a prepared loader; where a sharded model was prepared too, its batches are joined."""

    @functools.wraps(theirs)
    def iterate(self: Any) -> Iterator[Any]:
        group = _group_of_model(self)
        for batch in theirs(self):
            yield batch if group is None else joined(batch, group)

    return iterate


def _deals_out(accelerator: Any) -> bool:
    """Whether accelerate would wrap models by DDP: not alone, and not by FSDP or others, who answer for themselves."""
    return str(accelerator.distributed_type.value).startswith("MULTI_")


def _group_of_model(loader: Any) -> ProcessGroup | None:
    """The group of the sharded model that a loader's batches, each rank's own, go to; None if they do not."""
    accelerator = getattr(loader, OWNER, lambda: None)()
    if accelerator is None or not _deals_out(accelerator):
        return None
    parallelism = getattr(accelerator, "parallelism_config", None)
    if parallelism is not None and parallelism.tp_enabled:  # then accelerate gives ranks the same batches
        return None
    tensors = (one for model in accelerator._models for one in (*model.parameters(), *model.buffers()))
    return next((one._process_group for one in tensors if isinstance(one, ShardedTensor)), None)


def joined(batch: Any, group: ProcessGroup) -> Any:
    """The batch with all plain tensors in it joined with those of the other ranks, along their first dim.

    Numbers, which have none, stay plain: they are the same on every rank.
    """

    def join(value: Any) -> Any:
        plain = isinstance(value, torch.Tensor) and not isinstance(value, Distributed)
        return from_local(value, process_group=group) if plain and value.ndim else value

    return _mapped(join, batch)


def _gathering(theirs: Function) -> Function:
    """Accelerate's gather of tensors, lists and dicts: a sharded tensor is over all ranks already."""

    @functools.wraps(theirs)
    def gather(tensor: Any) -> Any:
        if not any(isinstance(leaf, ShardedTensor) for leaf in pytree.tree_leaves(tensor)):
            return theirs(tensor)
        return _mapped(lambda leaf: leaf.full_tensor() if isinstance(leaf, ShardedTensor) else theirs(leaf), tensor)

    return gather


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


def _mapped(change: Any, value: Any) -> Any:
    """The same nest of lists, tuples and mappings, with its ends changed; mappings stay of their class."""
    if isinstance(value, list | tuple):
        items = [_mapped(change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if hasattr(value, "keys") and hasattr(value, "items"):
        return type(value)({key: _mapped(change, item) for key, item in value.items()})
    return change(value)


replace_when_loaded("accelerate.accelerator", "Accelerator.prepare_model", _unwrapped)
replace_when_loaded("accelerate.accelerator", "Accelerator.prepare_data_loader", _owned)
replace_when_loaded("accelerate.accelerator", "Accelerator.save_model", _saved_by_all)
replace_when_loaded("accelerate.accelerator", "Accelerator.save_state", _refusing("save"))
replace_when_loaded("accelerate.accelerator", "Accelerator.load_state", _refusing("load"))
replace_when_loaded("accelerate.data_loader", "DataLoaderShard.__iter__", _joining)
replace_when_loaded("accelerate.data_loader", "DataLoaderDispatcher.__iter__", _joining)
replace_when_loaded("accelerate.utils.operations", "_gpu_gather", _gathering)
