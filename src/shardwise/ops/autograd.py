"""Backward from a sharded tensor: from its shards, and from the anchor of a rank that has none.

A sharded tensor is one value. Where it has replicas, what was computed from each of them counts once: only the first
replica of each box begins with a gradient, the others with zeros.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.dispatch import registry
from shardwise.errors import PropertyError
from shardwise.ops.compute import tie
from shardwise.ops.leaf_hooks import capturing, changed_by_hooks
from shardwise.process_group import group_ranks, in_step_sharing, is_member
from shardwise.sharded_tensor import ShardedTensorBase


def _locals(tensors: Any) -> list[torch.Tensor]:
    """The local tensors of one tensor or several, plain ones as they are."""
    each = tensors if isinstance(tensors, list | tuple) else [tensors]
    return [local for one in each for local in (one._local_tensors() if isinstance(one, ShardedTensorBase) else [one])]


def _roots(tensor: ShardedTensorBase, gradient: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Where this rank begins, and with what."""
    roots = list(tensor._local_tensors())
    if gradient is None:
        if tensor.numel() != 1:
            raise PropertyError("grad can be implicitly created only for scalar outputs: give backward a gradient")
        grads = [torch.ones_like(local) for local in roots]
    else:
        grads = list(tensor._locals_of(gradient))
    if tensor._layout.has_replicas:
        first = set(tensor._layout.primary.tolist())
        pairs = zip(tensor._frame.rows, grads, strict=True)
        grads = [grad if row in first else torch.zeros_like(grad) for row, grad in pairs]
    if not roots and tensor._anchor is not None:
        roots, grads = [tensor._anchor], [torch.zeros_like(tensor._anchor)]
    return roots, grads


def _all_roots(tensors: Any, gradients: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """The same for one tensor or several, sharded or plain."""
    each = _listed(tensors)
    roots: list[torch.Tensor] = []
    grads: list[Any] = []
    for tensor, gradient in zip(each, _listed(gradients) or [None] * len(each), strict=True):
        more = _roots(tensor, gradient) if isinstance(tensor, ShardedTensorBase) else ([tensor], [gradient])
        roots += more[0]
        grads += more[1]
    return roots, grads


def backward(tensors: Any, grad_tensors: Any = None, **options: Any) -> None:
    """`torch.autograd.backward` from several tensors at once, sharded or plain. Every rank calls it."""
    roots, grads = _all_roots(tensors, grad_tensors)
    if options.get("inputs") is not None:
        options["inputs"] = _locals(options["inputs"])
    if roots:
        _backward_plain(roots, grads, **options)


_backward_plain: Any = torch.autograd.backward  # torch's own


def _backward_from(types: Any, args: Any, kwargs: Any, process_group: Any) -> None:
    """`torch.autograd.backward`."""
    given = _PARAMETERS.bind(*args, **kwargs).arguments
    grads = given.pop("grad_variables", None)  # the old name
    backward(given.pop("tensors"), given.pop("grad_tensors", grads), **given)


@functools.wraps(_backward_plain)
def _backward_dispatched(*args: Any, **kwargs: Any) -> None:
    given = _PARAMETERS.bind(*args, **kwargs).arguments
    tensors = [*_listed(given["tensors"]), *_listed(given.get("inputs"))]
    if any(isinstance(one, ShardedTensorBase) for one in tensors):
        _backward_from((), args, kwargs, None)
    else:
        _backward_plain(*args, **kwargs)


_PARAMETERS = inspect.signature(_backward_plain)
if "handle_torch_function" not in _backward_plain.__code__.co_names:  # before torch 2.13, which asks the tensors
    torch.autograd.backward = _backward_dispatched


def _backward(types: Any, args: Any, kwargs: Any, process_group: Any) -> None:
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    given = {**dict(zip(names, args[1:], strict=False)), **kwargs}
    gradient = given.pop("gradient", None)
    backward([args[0]], [gradient], **given)


def _grad(types: Any, args: Any, kwargs: Any, process_group: Any) -> tuple[Any, ...]:
    """`torch.autograd.grad`: for each input a tensor that is sharded as it is."""
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "allow_unused")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    inputs = _listed(given.pop("inputs"))
    roots, grads = _all_roots(given.pop("outputs"), given.pop("grad_outputs", None))
    # A rank without shards of an input asks for its anchor's gradient, to take part; also if nothing is recorded now.
    with torch.enable_grad():
        asked = [_locals(one) or [one._anchored()] for one in inputs]
    with capturing():
        found = iter(torch.autograd.grad(roots, [leaf for leaves in asked for leaf in leaves], grads, **given))
    made: list[Any] = []
    for one, leaves in zip(inputs, asked, strict=True):
        pieces = [next(found) for _ in leaves]
        is_sharded = isinstance(one, ShardedTensorBase) and pieces[0] is not None
        made.append(changed_by_hooks(one, _gradient(one, pieces, given)) if is_sharded else pieces[0])
    return tuple(made)


def _gradient(tensor: ShardedTensorBase, pieces: list[torch.Tensor], options: dict[str, Any]) -> ShardedTensorBase:
    """The gradient of a tensor, from those of its local tensors, or of its anchor.

    If it can be differentiated again on any rank, then on a rank without shards, too: it may depend on the tensor.
    """
    again = bool(options.get("create_graph")) and _any_recorded(tensor, pieces)
    if tensor._local_tensors():
        return tensor._like(pieces)  # type: ignore[no-any-return] # of the same kind
    made: ShardedTensorBase = tensor._like([])
    made._wants_grad, made._anchor = again, None
    if again:
        made._anchor = tie([pieces[0], tensor._anchored()])  # type: ignore[list-item] # it was asked for a gradient
    return made


def _any_recorded(tensor: ShardedTensorBase, pieces: list[torch.Tensor]) -> bool:
    """Whether autograd records any rank's pieces; where all have shards, as here. One bit travels where not."""
    here, group = any(piece.requires_grad for piece in pieces), tensor._frame.process_group
    if group is None or not is_member(group):
        return here
    holders = {place.rank for place in tensor._layout.places}
    if holders.issuperset(group_ranks(group)):
        return here
    return any(in_step_sharing(group, lambda: (None, {"verb": "grad"}, here))[1])


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) else [value]


registry.built_in[torch.Tensor.backward] = _backward
registry.built_in[torch.autograd.backward] = _backward_from
registry.built_in[torch.autograd.grad] = _grad
