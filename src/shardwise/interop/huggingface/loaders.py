"""Patches of accelerate's data loaders: beside a sharded model, the ranks' batches are joined, every sample once.

Accelerate has several kinds of loaders, and loaders made from loaders (`skip_first_batches`, with which the Trainer
resumes within an epoch). All of them are iterated by one of two methods, which join the batches. The model of a loader
is found by the source of its samples: a loader made from another one has the same batch sampler or data set.

Accelerate repeats some samples so that all ranks have equally many. Joined batches may differ in size, so nothing is
repeated, and losses are exactly those of the data set.
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

from shardwise.patching import Function, replace_when_loaded
from shardwise.tensor import ShardedTensor
from shardwise.tensor.batch_forms import first_rows, row_count
from shardwise.tensor.batches import JointStep, joint_steps

LOADERS = "accelerate.data_loader"
# An attribute of accelerators, their loaders and the sources of those; and of the state that all accelerators share,
# for the accelerator that last prepared a sharded model.
OWNER = "_shardwise_owner"
IS_JOINED = "_shardwise_joined"  # an attribute of samplers and data sets: whether batches are joined


class _Owner:
    """The process group of an accelerator's sharded models, shared with the loaders that it prepared."""

    def __init__(self) -> None:
        self.group: ProcessGroup | None = None

    def __deepcopy__(self, memo: Any) -> _Owner:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()  # worker processes have no such group

    @staticmethod
    def of(one: Any) -> _Owner | None:
        """The owner of a loader, a sampler or a data set; None if no accelerator has prepared it."""
        found = getattr(one, OWNER, None)
        return found if isinstance(found, _Owner) else None


def distributes_batches(accelerator: Any) -> bool:
    """Whether accelerate would wrap models with DDP, and so gives each rank its own batches."""
    return str(accelerator.distributed_type.value).startswith("MULTI_")


def note_prepared(accelerator: Any, model: nn.Module) -> None:
    """Record the process group of a sharded model that an accelerator prepares."""
    tensors = (*model.parameters(), *model.buffers())
    group = next((one._process_group for one in tensors if isinstance(one, ShardedTensor)), None)
    parallelism = getattr(accelerator, "parallelism_config", None)
    is_same = parallelism is not None and parallelism.tp_enabled  # then all ranks get the same batches
    if group is not None and distributes_batches(accelerator) and not is_same:
        owner = _owner(accelerator)
        owner.group = group
        setattr(accelerator.gradient_state, OWNER, owner)


def _owner(accelerator: Any) -> _Owner:
    found: _Owner = vars(accelerator).setdefault(OWNER, _Owner())
    return found


def _free_models(theirs: Function) -> Function:
    """`Accelerator.free_memory`, which also forgets the group of the models."""

    @functools.wraps(theirs)
    def free(self: Any, *objects: Any) -> Any:
        _owner(self).group = None
        return theirs(self, *objects)

    return free


def _prepare_with_owner(theirs: Function) -> Function:
    """`Accelerator.prepare_data_loader`, which records the owner of loaders and their sources."""

    @functools.wraps(theirs)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        loader = theirs(self, *args, **kwargs)
        for one in (loader, _source(loader)):
            with suppress(AttributeError, TypeError):  # a data set without attributes
                setattr(one, OWNER, _owner(self))
        return loader

    return prepare


def _source(loader: Any) -> Any:
    """The source of a loader's samples: an iterable data set, else the batch sampler without skipping wrappers."""
    if isinstance(loader.dataset, IterableDataset):
        return loader.dataset
    sampler: Any = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    while hasattr(sampler, "skip_batches"):
        sampler = sampler.batch_sampler
    return sampler


def _iterate_joined(theirs: Function) -> Function:
    """The iterator of a loader; beside a sharded model, the batches of all ranks are joined."""

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
    """This rank's batches of a loader, and the loader's state, which must be the same on all ranks.

    Callers ask the state whether a batch is the last (then accumulated gradients are applied), and how many of its rows
    are samples.
    """

    def __init__(self, loader: Any, own: Iterator[Any]) -> None:
        self._loader, self._own, self._epoch = loader, own, loader.iteration
        self._is_active = False  # whether accelerate considers the loader active
        self._most_rows = 0
        self.device = getattr(loader, "device", None)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._own)
        self._is_active = True
        return _without_padding(self._loader, batch)

    def present(self, step: JointStep) -> None:
        """Update the loader's state for this step."""
        if not self._is_active:  # this rank had no batch at all
            self._loader.begin()
            self._is_active = True
        rows = row_count(step.batch)
        self._most_rows = max(self._most_rows, rows)
        self._loader.end_of_dataloader = step.is_last
        self._loader.remainder = rows if rows < self._most_rows else 0

    def end(self) -> None:
        """Exhaust accelerate's iterator, and count the epoch, which is then the same on every rank."""
        for _ in self._own:
            pass
        self._loader.end()
        self._loader.iteration = self._epoch + 1


def _without_padding(loader: Any, batch: Any) -> Any:
    """This rank's batch without the rows with which a dispatching loader pads the last batch."""
    if not hasattr(loader, "slice_fn") or not loader.end_of_dataloader or loader._drop_last:
        return batch
    rows = row_count(batch)
    count = loader.remainder - loader.state.process_index * rows  # the remainder counts the samples of all ranks
    return first_rows(batch, max(0, min(rows, count)), rows)


def _sample_once(theirs: Function) -> Function:
    """`BatchSamplerShard.__iter__`, which does not repeat samples where batches are joined."""

    @functools.wraps(theirs)
    def iterate(self: Any) -> Iterator[Any]:  # a generator: decides when it is first used
        if getattr(self, IS_JOINED, False):
            self = copy.copy(self)  # len() of the original must not change
            self.even_batches = False
        yield from theirs(self)

    return iterate


def _stream_once(theirs: Function) -> Function:
    """`IterableDatasetShard.__iter__`, which does not repeat samples where batches are joined."""

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
    """An iterable data set that counts its samples."""

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
    """The group of the sharded model that a loader's batches go to; None if there is none."""
    owner = _Owner.of(loader) or _Owner.of(_source(loader)) or _Owner.of(type(loader.gradient_state)())
    return None if owner is None else owner.group


replace_when_loaded("accelerate.accelerator", "Accelerator.prepare_data_loader", _prepare_with_owner)
replace_when_loaded("accelerate.accelerator", "Accelerator.free_memory", _free_models)
replace_when_loaded(LOADERS, "DataLoaderShard.__iter__", _iterate_joined)
replace_when_loaded(LOADERS, "DataLoaderDispatcher.__iter__", _iterate_joined)
replace_when_loaded(LOADERS, "BatchSamplerShard.__iter__", _sample_once)
replace_when_loaded(LOADERS, "IterableDatasetShard.__iter__", _stream_once)
