"""Sharded tensors within transforms of functions: those of `torch.func`, and forward-mode AD.

A transform of `torch.func` wraps the arguments of a function, sharded ones too. Torch unwraps them in aten ops, which
reach `aten` one by one. A sharded tensor that the function captures is a constant for the transform. An op on captured
tensors alone is computed as if no transform were running. An op on a captured tensor and an argument of the transform
is left to torch, which decomposes it into aten ops.

Forward-mode AD is refused: torch computes tangents on meta tensors and on tensors of zeros without data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from shardwise.errors import UnsupportedOpError
from shardwise.torch_private import (
    DisableTorchFunctionSubclass,
    functorch_level,
    is_functorch_tensor,
    pytree,
    without_functorch,
)

P = ParamSpec("P")
T = TypeVar("T")


def refuse_forward_mode() -> None:
    """Raise within a level of forward-mode AD."""
    if forward_ad._current_level >= 0:
        raise UnsupportedOpError(
            "forward-mode AD (torch.func.jvp, jacfwd, hessian and linearize, torch.autograd.forward_ad) does not work "
            "on sharded tensors: use reverse mode, which is torch.func.vjp, jacrev, and jacrev(jacrev(f)) for a "
            "hessian, or torch.autograd.functional.jvp, hvp and hessian"
        )


def compute_transformed(compute: Callable[..., T], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> T:
    """The result of a torch function within a transform; of captured tensors alone, that of ``compute()``."""
    refuse_forward_mode()
    if _wrapped_in(args, kwargs):
        with DisableTorchFunctionSubclass():
            return _with_matrices(func)(*args, **kwargs)  # type: ignore[no-any-return] # as compute would
    with without_functorch():
        return compute()


def _wrapped_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an argument of a transform, or a result computed from one, is among these values."""
    leaves = pytree.tree_leaves((args, kwargs))
    return any(isinstance(leaf, torch.Tensor) and is_functorch_tensor(leaf) for leaf in leaves)


def _with_matrices(func: Any) -> Any:
    """The function; a product without torch's in-place change of size for a vector and a matrix."""
    if func not in _PRODUCTS:
        return func

    def product(*args: Any, **kwargs: Any) -> Any:
        if "out" in kwargs:
            return func(*args, **kwargs)
        one, *rest = args or (kwargs.pop("input"),)
        (other,) = rest or kwargs.values()  # which torch has several names for
        if func is torch.Tensor.__rmatmul__:
            one, other = other, one
        of_a_vector = one.ndim == 1 and other.ndim == 2
        return torch.mv(other.t(), one) if of_a_vector else torch.matmul(one, other)

    return product


_PRODUCTS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__}


def below_transforms(verb: Callable[P, T]) -> Callable[P, T]:
    """Decorator: a verb that moves captured tensors as if no transform were running."""

    @functools.wraps(verb)
    def _below(*args: P.args, **kwargs: P.kwargs) -> T:
        if functorch_level() is None:
            return verb(*args, **kwargs)
        if _wrapped_in(args, kwargs):
            raise UnsupportedOpError(
                f"{verb.__qualname__} was given an argument of a transform of torch.func (grad, vmap, ...), whose data "
                "cannot be moved between ranks: call it before the transform, or use torch.autograd.grad"
            )
        with without_functorch():
            return verb(*args, **kwargs)

    return _below
