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

from shardwise.autograd.anchors import tie
from shardwise.autograd.replicas import Replicas, sum_of_replicas
from shardwise.autograd.task import captured_task
from shardwise.comm.agreement import in_step_sharing
from shardwise.comm.group import is_member
from shardwise.errors import PropertyError
from shardwise.ops.autograd.leaf_hooks import changed_by_hooks
from shardwise.ops.autograd.nodes import Whole
from shardwise.patching import replace_now
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import registry


def _reached_for(tensor: Any) -> list[Any]:
    """What the backward must reach on this rank where the gradient of a tensor is asked for.

    These are the local tensors; on a rank without any, the anchor. Autograd runs only the nodes that lead to what is
    asked for, and each local part of a result leads to every operand, by a local tensor or by its anchor. So the same
    collectives run on every rank, whatever it holds.
    """
    if not isinstance(tensor, ShardedTensorBase):
        return [tensor]
    if tensor._local_tensors():
        return tensor._local_tensors()
    with torch.enable_grad():  # also if nothing is recorded now
        anchor = tensor._anchored()
    return [torch.zeros((), device=tensor.device) if anchor is None else anchor]  # torch refuses both alike


def _roots(tensor: ShardedTensorBase, gradient: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Where this rank begins, and with what; a gradient that lies in another layout is moved, on every rank."""
    roots, anchor = list(tensor._local_tensors()), None
    if gradient is None:
        if tensor.numel() != 1:
            raise PropertyError("grad can be implicitly created only for scalar outputs: give backward a gradient")
        grads = [torch.ones_like(local) for local in roots]
        if tensor._layout.has_replicas:
            pairs = zip(tensor._frame.rows, grads, strict=True)
            grads = [grad if tensor._layout.is_first(row) else torch.zeros_like(grad) for row, grad in pairs]
    else:
        grads, anchor = Whole(tensor, has_anchor=False).counted_once(gradient)
    if not roots and tensor._anchor is not None:
        zero = torch.zeros_like(tensor._anchor)
        roots, grads = [tensor._anchor], [zero if anchor is None else zero + tie([anchor]).to(zero.device)]
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
    inputs = options.get("inputs")
    asked = [] if inputs is None else _listed(inputs)
    if inputs is not None:
        options["inputs"] = [leaf for one in asked for leaf in _reached_for(one)]
    if roots:
        _backward_plain(roots, grads, **options)
    for one in asked:
        _take_from_anchor(one)


def _take_from_anchor(tensor: Any) -> None:
    """Give the result of an op its gradient on a rank without shards, where torch has given one to the anchor."""
    if not isinstance(tensor, ShardedTensorBase) or tensor._local_tensors() or tensor.is_leaf:
        return
    anchor = tensor._anchor
    if anchor is not None and anchor.grad is not None:
        tensor._shardless_grad, anchor.grad = tensor._like([]).detach(), None


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
    replace_now(torch.autograd, "backward", _backward_dispatched)


def _backward(types: Any, args: Any, kwargs: Any, process_group: Any) -> None:
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    given = {**dict(zip(names, args[1:], strict=False)), **kwargs}
    gradient = given.pop("gradient", None)
    backward([args[0]], [gradient], **given)


def _grad(types: Any, args: Any, kwargs: Any, process_group: Any) -> tuple[Any, ...]:
    """`torch.autograd.grad`: for each input a tensor that is sharded as it is."""
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "allow_unused", "is_grads_batched")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.pop("is_grads_batched", False):
        return _grad_of_each(given)
    inputs, outputs = _listed(given.pop("inputs")), _listed(given.pop("outputs"))
    roots, grads = _all_roots(outputs, given.pop("grad_outputs", None))
    unused, records = given.pop("allow_unused", None), bool(given.get("create_graph"))
    asked = [_reached_for(one) for one in inputs]
    leaves = [leaf for each in asked for leaf in each]
    with captured_task(roots, records=records) as task:
        found = iter(torch.autograd.grad(roots, leaves, grads, allow_unused=True, **given))
    task.finish_work()
    pieces = [_filled([next(found) for _ in each], each) for each in asked]
    shared = [k for k, one in enumerate(inputs) if _adds_up_replicas(one)]
    for k in shared:
        pieces[k] = _filled_if_any(inputs[k], pieces[k], asked[k])
    if any(each[0] is None for each in pieces) and not (unused or given.get("materialize_grads")):
        raise PropertyError(
            "torch.autograd.grad was asked for the gradient of a tensor that the outputs do not depend on: "
            "allow_unused=True gives None for it"
        )
    if records:
        reached = [*roots, *(grad for grad in grads if grad is not None), *task.anchors]
        pieces = _alike([*inputs, *outputs], pieces, reached)
    for k in shared:
        pieces[k] = _summed(inputs[k], pieces[k])
    made: list[Any] = []
    with task.hooks.collecting():
        for one, each in zip(inputs, pieces, strict=True):
            is_sharded = isinstance(one, ShardedTensorBase) and each[0] is not None
            made.append(changed_by_hooks(one, _gradient(one, each)) if is_sharded else each[0])
    task.hooks.finish()
    return tuple(made)


def _grad_of_each(given: dict[str, Any]) -> tuple[Any, ...]:
    """The same with ``is_grads_batched``: the gradients of each entry of a batch of `grad_outputs`, one by one."""
    batches = _listed(given.pop("grad_outputs", None))
    count = next((len(batch) for batch in batches if batch is not None), 0)
    if not count:
        raise PropertyError("torch.autograd.grad with is_grads_batched=True needs grad_outputs of at least one entry")
    keeps = given.pop("retain_graph", None) or bool(given.get("create_graph"))
    found = []
    for k in range(count):
        grads = [None if batch is None else batch[k] for batch in batches]
        options = {**given, "grad_outputs": grads, "retain_graph": keeps or k < count - 1}
        found.append(_grad((), (), options, None))
    return tuple(None if each[0] is None else torch.stack(each) for each in zip(*found, strict=True))


def _filled(pieces: list[Any], leaves: list[Any]) -> list[Any]:
    """The gradients of the local tensors of one input; of those that nothing depended on, zeros beside the others."""
    if all(piece is None for piece in pieces):
        return pieces
    return [torch.zeros_like(leaf) if piece is None else piece for piece, leaf in zip(pieces, leaves, strict=True)]


def _adds_up_replicas(tensor: Any) -> bool:
    """Whether each replica of this tensor has a part of its gradient; those of a leaf have been given the whole."""
    return _is_in_group(tensor) and tensor._layout.has_replicas and not tensor.is_leaf


def _filled_if_any(tensor: ShardedTensorBase, pieces: list[Any], leaves: list[Any]) -> list[Any]:
    """Zeros for all replicas here, if nothing depended on them but something did on others; a bit travels."""
    if not any(bit for (bit,) in _told(tensor._frame.process_group, [pieces[0] is not None])):
        return pieces
    return pieces if pieces[0] is not None else [torch.zeros_like(leaf) for leaf in leaves]


def _summed(tensor: ShardedTensorBase, pieces: list[Any]) -> list[Any]:
    """The whole gradient for each replica. Every rank of the group calls it."""
    group = tensor._frame.process_group
    if group is None or pieces[0] is None:
        return pieces
    parts = [piece.contiguous() for piece in pieces[: len(tensor._frame.rows)]]
    anchor, *sums = sum_of_replicas(Replicas(tensor._layout, group, tensor.dtype), tie(pieces), *parts)
    return sums or [anchor]


def _gradient(tensor: ShardedTensorBase, pieces: list[torch.Tensor]) -> ShardedTensorBase:
    """The gradient of a tensor, from those of its local tensors, or of its anchor."""
    if tensor._local_tensors():
        return tensor._like(pieces)  # type: ignore[no-any-return] # of the same kind
    made: ShardedTensorBase = tensor._like([])
    made._wants_grad = pieces[0].requires_grad
    made._anchor = pieces[0] if made._wants_grad else None
    return made


def _alike(tensors: list[Any], pieces: list[list[Any]], reached: list[torch.Tensor]) -> list[list[Any]]:
    """Gradients that can be differentiated again on every rank if they can on any; a few bits travel.

    What they depend on differs from rank to rank. So they are made to depend on all that the backward began with and
    came through, on every rank: then the next backward runs the same collectives everywhere.
    """
    records = [any(piece is not None and piece.requires_grad for piece in each) for each in pieces]
    groups = {id(one._frame.process_group): one._frame.process_group for one in tensors if _is_in_group(one)}
    for group in groups.values():
        records = [any(bits) for bits in zip(*_told(group, records), strict=True)]
    with torch.enable_grad():
        nothing = tie(reached)
        for each, again in zip(pieces, records, strict=True):
            if again and each[0] is not None:
                each[:] = [piece + nothing.to(piece.device, piece.dtype) for piece in each]
    return pieces


def _told(group: Any, bits: list[bool]) -> list[list[bool]]:
    return in_step_sharing(group, lambda: (None, {"verb": "grad"}, bits))[1]


def _is_in_group(tensor: Any) -> bool:
    group = tensor._frame.process_group if isinstance(tensor, ShardedTensorBase) else None
    return group is not None and is_member(group)


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) else [value]


registry.built_in[torch.Tensor.backward] = _backward
registry.built_in[torch.autograd.backward] = _backward_from
registry.built_in[torch.autograd.grad] = _grad
