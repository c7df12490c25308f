"""Accelerate's loaders beside a sharded model: what they deal out to ranks is joined again, every sample once.

Accelerate makes loaders in several ways, and loaders of loaders (`skip_first_batches`, by which the Trainer resumes in
the middle of an epoch). All of them are iterated by one of two methods, and that is where batches are joined. Which
model a loader's batches go to is known by what it gets its samples from: a loader that is made of another one has the
same batch sampler or data set inside.

To give all ranks equally many samples, accelerate deals out some of them twice. Ranks that join their batches need not
have equally many, so nothing is dealt out twice, and losses are those over the data set.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.data import BatchSampler, IterableDataset

from shardwise.batches import Step, first_rows, joint_steps, row_count
from shardwise.interop.loading import Function, replace_when_loaded
from shardwise.sharded_tensor import ShardedTensor

LOADERS = "accelerate.data_loader"
# On an accelerator, on the loaders that it has prepared, and on what they get their samples from; and on the state that
# all accelerators share, of the one that prepared a sharded model last.
OWNER = "_shardwise_owner"
IS_JOINED = "_shardwise_joined"  # on what deals out samples to ranks: whether their batches are joined


class _Owner:
    """What loaders know of the accelerator that prepared them: on which group its sharded models are."""

    def __init__(self) -> None:
        self.group: ProcessGroup | None = None

    def __deepcopy__(self, memo: Any) -> _Owner:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()  # a loader or a data set may be sent to another process, where there is no such group

    @staticmethod
    def of(one: Any) -> _Owner | None:
        """That of a loader, a sampler or a data set; None if accelerate has prepared it without an accelerator."""
        found = getattr(one, OWNER, None)
        return found if isinstance(found, _Owner) else None


def deals_out(accelerator: Any) -> bool:
    """Whether accelerate would wrap models by DDP: not alone, and not by FSDP or others, who answer for themselves."""
    return str(accelerator.distributed_type.value).startswith("MULTI_")


def note_prepared(accelerator: Any, model: nn.Module) -> None:
    """Remember on which group a sharded model is that an accelerator prepares."""
    tensors = (*model.parameters(), *model.buffers())
    group = next((one._process_group for one in tensors if isinstance(one, ShardedTensor)), None)
    parallelism = getattr(accelerator, "parallelism_config", None)
    is_same = parallelism is not None and parallelism.tp_enabled  # then accelerate gives ranks the same batches
    if group is not None and deals_out(accelerator) and not is_same:
        owner = _owner(accelerator)
        owner.group = group
        setattr(accelerator.gradient_state, OWNER, owner)


def _owner(accelerator: Any) -> _Owner:
    found: _Owner = vars(accelerator).setdefault(OWNER, _Owner())
    return found


def _forgetting(theirs: Function) -> Function:
    """`Accelerator.free_memory`, after which it has no models."""

    @functools.wraps(theirs)
    def free(self: Any, *objects: Any) -> Any:
        _owner(self).group = None
        return theirs(self, *objects)

    return free


def _owned(theirs: Function) -> Function:
    """`Accelerator.prepare_data_loader`, whose loaders and their sources know who prepared them."""

    @functools.wraps(theirs)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        loader = theirs(self, *args, **kwargs)
        for one in (loader, _source(loader)):
            with suppress(AttributeError, TypeError):  # a data set that takes no attributes
                setattr(one, OWNER, _owner(self))
        return loader

    return prepare


def _source(loader: Any) -> Any:
    """What a loader gets its samples from: a data set that is a stream, else the batch sampler, without what skips."""
    if isinstance(loader.dataset, IterableDataset):
        return loader.dataset
    sampler: Any = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    while hasattr(sampler, "skip_batches"):
        sampler = sampler.batch_sampler
    return sampler


def _joining(theirs: Function) -> Function:
    """The iterator of a loader; where a sharded model was prepared too, the batches of all ranks are joined."""

    @functools.wraps(theirs)
    def iterate(self: Any) -> Iterator[Any]:
        group = _group_for(self)
        with suppress(AttributeError, TypeError):
            setattr(_source(self), IS_JOINED, group is not None)
        if group is None:
            yield from theirs(self)
            return
        batches = _Batches(self, theirs(self))
        steps = joint_steps(batches, group, is_last=lambda: bool(self.end_of_dataloader), device=batches.device)
        for step in steps:
            batches.present(step)
            yield step.batch
        batches.end()

    return iterate


class _Batches:
    """This rank's batches of a loader; and the loader's state, which says of all ranks' batches what it says of one's.

    Callers ask the state whether a batch is the last (then gradients that were accumulated are used) and how many rows
    of it are samples. Both must be the same on every rank.
    """

    def __init__(self, loader: Any, own: Iterator[Any]) -> None:
        self._loader, self._own, self._epoch = loader, own, loader.iteration
        self._is_active = False  # whether accelerate takes the loader for one that is iterated
        self._most_rows = 0
        self.device = getattr(loader, "device", None)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._own)
        self._is_active = True
        return _undoubled(self._loader, batch)

    def present(self, step: Step) -> None:
        """Have the loader's state say what holds for this step."""
        if not self._is_active:  # this rank had no batch at all
            self._loader.begin()
            self._is_active = True
        rows = row_count(step.batch)
        self._most_rows = max(self._most_rows, rows)
        self._loader.end_of_dataloader = step.is_last
        self._loader.remainder = rows if rows < self._most_rows else 0

    def end(self) -> None:
        """Let accelerate's iterator end; the next epoch has the same number on every rank."""
        for _ in self._own:
            pass
        self._loader.end()
        self._loader.iteration = self._epoch + 1


def _undoubled(loader: Any, batch: Any) -> Any:
    """This rank's batch without rows that a dispatching loader has added, so that the last one can be divided."""
    if not hasattr(loader, "slice_fn") or not loader.end_of_dataloader or loader._drop_last:
        return batch
    rows = row_count(batch)
    count = loader.remainder - loader.state.process_index * rows  # it counts all ranks' samples
    return first_rows(batch, max(0, min(rows, count)), rows)


def _dealt_out_once(theirs: Function) -> Function:
    """`BatchSamplerShard.__iter__`, which starts anew to fill the last batches only where they are not joined."""

    @functools.wraps(theirs)
    def iterate(self: Any) -> Iterator[Any]:  # which decides with its first batch: loaders may make it long before
        if getattr(self, IS_JOINED, False):
            self = copy.copy(self)  # others ask this one how many batches there are
            self.even_batches = False
        yield from theirs(self)

    return iterate


def _streamed_once(theirs: Function) -> Function:
    """`IterableDatasetShard.__iter__`, likewise."""

    @functools.wraps(theirs)
    def iterate(self: Any) -> Iterator[Any]:
        if not getattr(self, IS_JOINED, False):
            yield from theirs(self)
            return
        counted = copy.copy(self)
        counted.dataset = stream = _Counted(self.dataset)
        at_once = self.batch_size // self.num_processes if self.split_batches else self.batch_size
        for number, sample in enumerate(theirs(counted)):
            turn, place = divmod(number, at_once)
            position = (turn * self.num_processes + self.process_index) * at_once + place
            if stream.is_exhausted and position >= stream.count:
                return
            yield sample

    return iterate


class _Counted:
    """A data set that is a stream, and how many samples have come of it."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self.count, self.is_exhausted = dataset, 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __iter__(self) -> Iterator[Any]:
        for sample in self._dataset:
            self.count += 1
            yield sample
        self.is_exhausted = True


def _group_for(loader: Any) -> ProcessGroup | None:
    """The group of the sharded model that a loader's batches, each rank's own, go to; None if they do not."""
    owner = _Owner.of(loader) or _Owner.of(_source(loader)) or _Owner.of(type(loader.gradient_state)())
    return None if owner is None else owner.group


replace_when_loaded("accelerate.accelerator", "Accelerator.prepare_data_loader", _owned)
replace_when_loaded("accelerate.accelerator", "Accelerator.free_memory", _forgetting)
replace_when_loaded(LOADERS, "DataLoaderShard.__iter__", _joining)
replace_when_loaded(LOADERS, "DataLoaderDispatcher.__iter__", _joining)
replace_when_loaded(LOADERS, "BatchSamplerShard.__iter__", _dealt_out_once)
replace_when_loaded(LOADERS, "IterableDatasetShard.__iter__", _streamed_once)
