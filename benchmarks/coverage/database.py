"""Torch's own database of ops, as a source of calls to try."""

from __future__ import annotations

import functools
import importlib.util
import random
import sys
import unittest
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

SEED = 20240229
DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool)  # the first that an op takes; else any

# Results that are drawn at random: only their shape and dtype are known, and that all ranks have the same.
RANDOM = {
    "bernoulli",
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "multinomial",
    "nn.functional.alpha_dropout",
    "nn.functional.dropout",
    "nn.functional.dropout2d",
    "nn.functional.dropout3d",
    "nn.functional.feature_alpha_dropout",
    "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d",
    "nn.functional.rrelu",
    "normal",
    "pca_lowrank",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "svd_lowrank",
    "uniform",
}
# Those of which a sharded tensor does not draw torch's own numbers, or whose results are not unique.
DRAWN_OTHERWISE = {"nn.functional.rrelu", "pca_lowrank", "svd_lowrank"}
ATTENTION = "nn.functional.multi_head_attention_forward"  # which is told by position how much to drop
# Results whose memory nobody has written: only their shape and dtype are known.
UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# Results that nobody has written, by number: the state of the generator where kernels of attention drop nothing.
UNWRITTEN = {
    "torch.ops.aten._flash_attention_forward": (2, 3),
    "torch.ops.aten._efficient_attention_forward": (2, 3),
}


@dataclass(frozen=True)
class Case:
    """One call of an op: its arguments as a flat list, with tensors contiguous and apart from the graph."""

    call: Callable[..., Any]
    arguments: list[Any]
    tree: pytree.TreeSpec
    wants_grad: list[bool]  # by argument; only those that are sharded, since a scalar lies on every rank
    outputs_for_loss: Callable[[Any], Any]  # what of the result a gradient can be taken of
    random: bool
    drawn_alike: bool  # whether a sharded tensor on a CPU draws what a plain one does
    uninitialised: bool
    unwritten: tuple[int, ...] = ()  # results of which only shape and dtype are known

    def run(self, arguments: list[Any]) -> Any:
        """Call the op with these in place of its own arguments."""
        first, args, kwargs = pytree.tree_unflatten(arguments, self.tree)
        return self.call(first, *args, **kwargs)

    def plain(self, *, grad: bool) -> list[Any]:
        """Its own arguments, copied, since an op may write to them."""
        pairs = zip(self.arguments, self.wants_grad, strict=True)
        return [copied(leaf).requires_grad_(grad and wanted) if is_dense(leaf) else leaf for leaf, wanted in pairs]

    @property
    def differentiable(self) -> bool:
        """Whether there is a sharded argument to take a gradient for."""
        return any(self.wants_grad)

    def __str__(self) -> str:
        """Its arguments, tensors by dtype and size."""
        first, args, kwargs = pytree.tree_unflatten(list(map(_Told, self.arguments)), self.tree)
        return ", ".join([*map(str, (first, *args)), *(f"{name}={value}" for name, value in kwargs.items())])[:160]

    def cuts(self) -> list[str]:
        """Which of the shardings differ for these arguments."""
        return ["first", "last"] if any(can_be_cut(leaf) and leaf.ndim > 1 for leaf in self.arguments) else ["first"]


class _Told:
    """An argument that prints in a few characters."""

    def __init__(self, value: Any) -> None:
        self._text = f"{str(value.dtype)[6:]}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)

    def __repr__(self) -> str:
        return self._text


class NoCases(Exception):
    """There is nothing to try for an op; says why."""


def stand_in_for_expecttest() -> None:
    """Give torch's tests a package that they want and we do not need."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        stand_in = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined] # made here
        sys.modules["expecttest"] = stand_in


@functools.cache
def ops() -> dict[str, Any]:
    """Every entry of the database by its name, with the variant behind a second dot."""
    stand_in_for_expecttest()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that torch's tests use where there are any
        from torch.testing._internal.common_methods_invocations import op_db

    return {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db}


def names(patterns: list[str]) -> list[str]:
    """The names that fit a pattern, by the whole name or without the variant; all when there is no pattern."""

    def fits(name: str, op: Any) -> bool:
        return any(fnmatchcase(name, pattern) or fnmatchcase(op.name, pattern) for pattern in patterns)

    return [name for name, op in ops().items() if not patterns or fits(name, op)]


def cases(name: str, most: int, device: str) -> list[Case]:
    """At most so many calls of an op on a device, spread over all that the database has; the same on every rank."""
    op = ops()[name]
    supported = op.supported_dtypes(device)
    if not supported:
        raise NoCases(f"not for {device.upper()}")
    dtype = next((dtype for dtype in DTYPES if dtype in supported), None) or min(supported, key=str)
    grad = op.supports_autograd and dtype in op.supported_backward_dtypes(device)
    seed()
    try:
        samples = list(op.sample_inputs_func(op, device, dtype, grad))  # without notes on where each comes from
    except Exception as error:
        raise NoCases(f"no samples: {type(error).__name__}: {error}") from error
    found = [sample for sample in samples if any(map(can_be_cut, _arguments(sample)))]
    if not found:
        raise NoCases("no tensor to shard")
    return [_case(op, sample) for sample in spread(found, most)]


def seed(offset: int = 0) -> None:
    """Set every random generator to the same state."""
    torch.default_generator.manual_seed(SEED + offset)  # not those of devices that are not there, which takes long
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(SEED + offset)
    np.random.seed((SEED + offset) % 2**32)
    random.seed(SEED + offset)


def is_dense(leaf: object) -> bool:
    """Whether it is a tensor with an element for each index, not a sparse or nested one."""
    return isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_nested


def can_be_cut(leaf: object) -> bool:
    """Whether it is a tensor with a dim to cut."""
    return isinstance(leaf, torch.Tensor) and leaf.ndim >= 1


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy without history."""
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _arguments(sample: Any) -> list[Any]:
    return pytree.tree_leaves((sample.input, sample.args, sample.kwargs))


def spread(samples: list[Any], most: int) -> Iterator[Any]:
    """At most so many of the samples, the first and the last among them."""
    if len(samples) <= most:
        yield from samples
    else:
        for k in range(most):
            yield samples[k * (len(samples) - 1) // max(most - 1, 1)]


def _case(op: Any, sample: Any) -> Case:
    leaves, tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    wants_grad = [can_be_cut(leaf) and leaf.requires_grad for leaf in leaves]
    drops = sample.args[9] if op.name == ATTENTION else sample.kwargs.get("dropout_p", 0.0)
    return Case(
        call=op.op,
        arguments=[copied(leaf) if is_dense(leaf) else leaf for leaf in leaves],
        tree=tree,
        wants_grad=wants_grad,
        outputs_for_loss=sample.output_process_fn_grad,
        random=op.name in RANDOM or bool(drops),
        drawn_alike=op.name not in DRAWN_OTHERWISE,
        uninitialised=op.name in UNINITIALISED,
        unwritten=() if drops else UNWRITTEN.get(op.name, ()),
    )
