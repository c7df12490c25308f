"""`Work`: what is trained: a model, a batch, an optimizer, a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from shardwise.errors import PlanError
from shardwise.nn.fully_sharded.unit_choice import choose_units
from shardwise.nn.sharding_plan import ModuleTree
from shardwise.torch_private import pytree

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
}
FEW = 3  # blocks of the shorter model: while one computes, another is gathered and a third one is summed
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Work:
    """What is trained."""

    model: nn.Module
    inputs: Any  # arguments of the model for all samples, on meta: a tensor, a tuple, or a mapping
    optimizer: Callable[[Any], torch.optim.Optimizer]
    loss: Callable[[Any], torch.Tensor]
    dtype: torch.dtype | None  # that parameters are converted to
    runs_shortened: bool = True  # whether the model computes with fewer blocks, too, as far as is known

    @property
    def samples(self) -> int:
        """Of the batch."""
        return int(pytree.tree_leaves(self.inputs)[0].shape[0])

    @property
    def bytes_of_sample(self) -> float:
        """Of all inputs."""
        return float(sum(one.nbytes for one in pytree.tree_leaves(self.inputs))) / self.samples

    def batch(self, samples: int) -> Any:
        """The arguments for so many samples."""
        return pytree.tree_map(lambda one: torch.empty((samples, *one.shape[1:]), dtype=one.dtype), self.inputs)

    @property
    def blocks(self) -> int:
        """How many equal blocks the model has: its longest list of them."""
        return max((len(one._modules) for one in self._lists), default=1)

    @property
    def probed(self) -> tuple[int, ...]:
        """The numbers of blocks of models that tell what all blocks cost."""
        return (FEW, FEW + 1) if self.runs_shortened and self.blocks > FEW else (self.blocks,)

    def for_all_blocks(self, first: float, last: float) -> float:
        """A measure for all blocks, of those for the smallest and for the largest number that is probed."""
        return first + (last - first) * (self.blocks - self.probed[0])

    @cached_property
    def _lists(self) -> list[Any]:
        """The lists of equal modules, outermost."""
        paths = [choice.path for choice in choose_units(ModuleTree(self.model), None) if choice.path]
        parents = dict.fromkeys(path.rpartition(".")[0] for path in paths)
        lists = [self.model.get_submodule(path) for path in parents]
        return [one for one in lists if len(set(map(_outline, one.children()))) == 1]

    @contextmanager
    def shortened(self, blocks: int) -> Iterator[None]:
        """Within this context, the model has so many blocks at most."""
        lists = self._lists
        before = [one._modules for one in lists]
        longest = self.blocks
        for one in lists:
            if len(one._modules) == longest:
                one._modules = dict(list(one._modules.items())[:blocks])
        try:
            yield
        finally:
            for one, modules in zip(lists, before, strict=True):
                one._modules = modules


def work_of(
    model: nn.Module,
    batch: Any,
    optimizer: str | Callable[[Any], torch.optim.Optimizer],
    loss: Callable[[Any], torch.Tensor] | None,
    precision: str | torch.dtype | None,
) -> Work:
    """What is trained, of what a caller gives."""
    return Work(model, _inputs(batch), _optimizer(optimizer), loss or loss_of, _dtype(precision))


def _outline(module: nn.Module) -> tuple[Any, ...]:
    """What equal modules have in common: class, and names, sizes and dtypes of parameters."""
    return type(module), *((name, one.shape, one.dtype) for name, one in module.named_parameters())


def loss_of(output: Any) -> torch.Tensor:
    """The loss that a model gives, or a sum of what it gives."""
    found = getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    tensors = [one for one in pytree.tree_leaves(output) if isinstance(one, torch.Tensor) and one.is_floating_point()]
    if not tensors:
        raise PlanError("the model gives no tensor that could be a loss: name one, as in loss=lambda output: output[0]")
    return tensors[0].float().mean()


def _inputs(batch: Any) -> Any:
    """Arguments on meta. Two numbers are samples and tokens of a language model."""
    if isinstance(batch, tuple) and len(batch) == 2 and all(isinstance(one, int) for one in batch):
        if min(batch) < 1:
            raise PlanError(f"a batch has at least one sample of one token; found {batch}")
        ids = torch.empty(batch, dtype=torch.long, device="meta")
        return {"input_ids": ids, "labels": ids}
    tensors = [one for one in pytree.tree_leaves(batch) if isinstance(one, torch.Tensor)]
    if not tensors or len({one.shape[:1] for one in tensors}) != 1 or not tensors[0].ndim:
        raise PlanError(
            "batch is (samples, tokens) for a language model, or what the model is called with, for all samples: a "
            "tensor, a tuple or a mapping of tensors, whose first dim is that of the samples"
        )
    if not tensors[0].shape[0]:
        raise PlanError("a batch has at least one sample; this one has none")
    return pytree.tree_map(lambda one: torch.empty_like(one, device="meta"), batch)


def _optimizer(given: str | Callable[[Any], torch.optim.Optimizer]) -> Callable[[Any], torch.optim.Optimizer]:
    if callable(given):
        return given
    if given not in OPTIMIZERS:
        raise PlanError(f"there is no optimizer {given!r:.80}: name one of {', '.join(OPTIMIZERS)}, or give a function")
    return OPTIMIZERS[given]


def _dtype(given: str | torch.dtype | None) -> torch.dtype | None:
    if given is None or isinstance(given, torch.dtype):
        return given
    if given not in DTYPES:
        raise PlanError(f"there is no precision {given!r:.80}: name one of {', '.join(DTYPES)}")
    return DTYPES[given]


def called(model: nn.Module, inputs: Any) -> Any:
    """What the model gives for arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
