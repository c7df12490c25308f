"""`torch._foreach_*` and `torch._fused_*`: functions of lists of tensors.

A row consists of the entries with one index in all lists. Rows whose tensors have the same layout are computed
together, on the shards. Other rows (different layouts, plain tensors beside sharded ones, rows that autograd records)
are computed one by one, by the function for one tensor. Every rank knows the rows from the layouts.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.agreement import record_call
from shardwise.comm.group import DIGEST, CallFingerprint, Fields, is_member
from shardwise.comm.transfer import make_plan, move
from shardwise.errors import PropertyError
from shardwise.layout import Layout
from shardwise.ops.engine.chunking import group_chunks
from shardwise.ops.engine.compute import assemble, group_places, result_frame
from shardwise.ops.engine.gathered import is_fully_replicated
from shardwise.ops.engine.rule import broadcast_shapes
from shardwise.ops.engine.steps import without_autocast
from shardwise.ops.families.pointwise import is_pointwise
from shardwise.tensor import ShardedTensor, ShardedTensorBase
from shardwise.tensor.dispatch import TAKE_ANY, Op, is_dtensor, mixed_operands, registry
from shardwise.tensor.redistribution_cache import count_write
from shardwise.torch_private import clipping_foreach_types, foreach_norm, optimizer_foreach_types

aten = torch.ops.aten
UNTAGGED = ("clone", "copy", "zero")  # pointwise, but not tagged


def _shards(one: Any, model: Any) -> list[Any]:
    """One entry of a list as a value for each shard of the tensor in the first list.

    On a rank without shards, the value is an empty tensor, which shows the dtype.
    """
    if one.__class__ is model.__class__ and isinstance(one, ShardedTensorBase) and one._frame is model._frame:
        tensors = one._local_tensors()
        if tensors:  # the usual case
            return tensors
    if not isinstance(model, ShardedTensorBase):
        if isinstance(one, ShardedTensorBase):
            raise PropertyError("a fused function was given a sharded tensor where the first list has a plain one")
        return [one]
    if isinstance(one, ShardedTensorBase):
        return model._locals_of(one) or [torch.empty(0, dtype=one.dtype, device=one.device)]
    rows = model._frame.rows
    if not isinstance(one, torch.Tensor) or not one.ndim:
        return [one] * max(len(rows), 1)
    wide = one.expand(model.shape)
    return [wide[model._layout.index(row)] for row in rows] or [one.reshape(-1)[:0]]


def _value(arg: Any) -> Any:
    """A number in a sharded tensor, as a plain one; no message if every rank has it."""
    if not isinstance(arg, ShardedTensor):
        return arg
    return arg._local_tensors()[0] if is_fully_replicated(arg) else arg.full_tensor()


def _is_alike(one: Any, model: Any) -> bool:
    """Whether an entry can take the layout of the tensor in the first list without a transfer."""
    if one.__class__ is float or one is model:
        return True
    if isinstance(one, ShardedTensorBase) and isinstance(model, ShardedTensorBase) and one._frame is model._frame:
        return True  # the usual case
    if not isinstance(one, torch.Tensor):
        return True
    if not isinstance(one, ShardedTensorBase):
        return not one.ndim or one.shape == model.shape or _fits(one.shape, model.shape)
    if not isinstance(model, ShardedTensorBase) or one._frame.process_group is not model._frame.process_group:
        return False
    return one._layout == model._layout or model._layout.order_of(one._layout) is not None


def _fits(shape: torch.Size, into: torch.Size) -> bool:
    try:
        return broadcast_shapes(shape, into) == into
    except RuntimeError:
        return False


def _is_recorded(row: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(one, torch.Tensor) and one.requires_grad for one in row)


def _together(op: Op, lists: list[Any], rest: dict[str, Any], *, in_place: bool) -> list[Any]:
    """The function on the shards of all rows at once; a result for each row."""
    first, recording = lists[0], torch.is_grad_enabled()
    for one in first if in_place else ():
        if isinstance(one, ShardedTensorBase) and (recording or one._view_of is not None or one._copy_of_view):
            one._require_writable()
    for arg in (*lists, *rest.values()) if in_place else ():  # the state of an optimizer is written, too
        for one in arg if isinstance(arg, list | tuple) else ():
            if isinstance(one, ShardedTensorBase):
                count_write(one)

    def flat(arg: Any) -> Any:
        """A list for each tensor as a list for each shard."""
        if not isinstance(arg, list | tuple):
            return _value(arg)
        if arg and len(arg) != len(first):  # state that an optimizer does not keep is an empty list
            raise PropertyError(f"{op.__name__} was given lists of {len(first)} and {len(arg)} tensors")
        pairs = zip(arg, first, strict=bool(arg))
        return [leaf for one, model in pairs for leaf in _shards(one, model)]

    made = op(*map(flat, lists), **{name: flat(value) for name, value in rest.items()})
    if in_place:
        return list(first)
    remaining, results = iter(made), []
    for one in first:
        pieces = [next(remaining) for _ in _shards(one, one)]
        if isinstance(one, ShardedTensorBase):
            results.append(one._like(pieces if one._local_tensors() else [], pieces[0].dtype))
        else:
            results.append(pieces[0])
    return results


def _by_position(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a foreach function, by position where possible."""
    packet = getattr(aten, name)
    for overload in packet.overloads() if kwargs else ():
        schema = getattr(packet, overload)._schema.arguments
        names = [argument.name for argument in schema if not argument.kwarg_only]
        if overload.endswith("out") or not kwargs.keys() <= {argument.name for argument in schema}:
            continue
        rest = dict(kwargs)
        given = list(args)
        while len(given) < len(names) and names[len(given)] in rest:
            given.append(rest.pop(names[len(given)]))
        if not rest.keys() & set(names):
            return given, rest
    return list(args), kwargs


Together = Callable[..., list[Any]]


def _register(
    name: str, alone: Callable[..., Any], *, on_shards: bool = False, together: Together | None = None
) -> None:
    """Handle a foreach function.

    ``alone`` is the function for one row, ``together`` for all rows of tensors that are sharded over one group.
    """
    op, in_place = getattr(torch, name), name.endswith("_")

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        given, rest = _by_position(name, args, kwargs)
        count = next(len(arg) for arg in given if isinstance(arg, list | tuple))
        if len(given) == 4 and isinstance(given[3], torch.Tensor):  # a number for each row
            given[3] = _value(given[3]).tolist()
        if not torch.is_grad_enabled():
            given[1:] = [_value(arg) if isinstance(arg, ShardedTensor) and not arg.ndim else arg for arg in given[1:]]
        for arg in given:
            if isinstance(arg, list | tuple) and len(arg) != count:
                raise PropertyError(f"{name} was given lists of {count} and {len(arg)} entries")
        if on_shards and _are_usual(given):
            made = _together(op, given, rest, in_place=in_place)
            return given[0] if in_place else tuple(made)
        columns = [list(arg) if isinstance(arg, list | tuple) else [arg] * count for arg in given]
        rows = list(zip(*columns, strict=True))
        apart = [
            _is_of_dtensors(op, row)
            or not on_shards
            or not isinstance(row[0], torch.Tensor)
            or _is_recorded(row)
            or not all(_is_alike(one, row[0]) for one in row)
            for row in rows
        ]
        results: list[Any] = [None] * count
        if together is not None:
            for numbers in _by_group(rows):
                for k, result in zip(numbers, together([rows[k][0] for k in numbers], *given[1:], **rest), strict=True):
                    results[k], apart[k] = result, False
        alike = [k for k in range(count) if not apart[k] and results[k] is None]
        if alike:
            picked = [
                [column[k] for k in alike] if isinstance(arg, list | tuple) else arg
                for arg, column in zip(given, columns, strict=True)
            ]
            for k, result in zip(alike, _together(op, picked, rest, in_place=in_place), strict=True):
                results[k] = result
        for k, row in enumerate(rows):
            if apart[k]:
                with without_autocast():  # autocast does not apply to foreach functions
                    results[k] = alone(*row, **rest)
        return given[0] if in_place else tuple(results)

    registry.built_in[op] = handler
    TAKE_ANY.add(op)


def _are_usual(given: Sequence[Any]) -> bool:
    """Whether each row has sharded tensors of one frame, and numbers, as in the step of an optimizer."""
    first = given[0]
    if torch.is_grad_enabled() or not isinstance(first, list | tuple):
        return False
    for arg in given:
        if not isinstance(arg, list | tuple):
            if isinstance(arg, torch.Tensor) and (arg.__class__ is not torch.Tensor or arg.ndim):
                return False
            continue
        for one, model in zip(arg, first, strict=True):
            if one.__class__ is float:
                continue
            if one.__class__ is not ShardedTensor or model.__class__ is not ShardedTensor:
                return False
            if one._frame is not model._frame:
                return False
    return True


def _is_of_dtensors(op: Op, row: Sequence[Any]) -> bool:
    """Whether a row has DTensors; it must not have sharded tensors, too."""
    if not any(map(is_dtensor, row)):
        return False
    if any(isinstance(one, ShardedTensorBase) for one in row):
        raise mixed_operands(op, row)
    return True


def _by_group(rows: Sequence[Sequence[Any]]) -> list[list[int]]:
    """The numbers of rows that are sharded over the same group and kinds of devices, and not recorded."""
    found: dict[Any, list[int]] = {}
    for k, row in enumerate(rows):
        one = row[0]
        if isinstance(one, ShardedTensor) and not _is_recorded(row) and is_member(one._process_group):
            found.setdefault((one._process_group, one._layout.places.device_types), []).append(k)
    return list(found.values())


def _register_fused(op: Op) -> None:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> None:
        _together(op, list(args), kwargs, in_place=True)

    registry.built_in[op] = handler


# The functions for one row, unless they have the same name ----------------------------------------------------------


def _extreme(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.maximum` or `minimum`, also with a number."""

    def alone(x: torch.Tensor, other: Any) -> torch.Tensor:
        if not isinstance(other, torch.Tensor):
            other = torch.tensor(other, dtype=torch.result_type(x, other), device=x.device)
        return function(x, other)

    return alone


def _written(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same in place."""
    return lambda x, *rest: x.copy_(function(x, *rest))


def _with_value(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`addcmul` and `addcdiv`, which take their number by name."""
    return lambda x, one, other, value=1: function(x, one, other, value=value)


def _norm(x: torch.Tensor, ord: Any = 2, dtype: torch.dtype | None = None) -> Any:
    return torch.linalg.vector_norm(x, ord, dtype=dtype)


def _norms(tensors: Sequence[ShardedTensor], ord: Any = 2, dtype: torch.dtype | None = None) -> list[Any]:
    """The norms of tensors of one group: each rank sends the norms of its parts of all tensors in one message."""
    first, order = tensors[0], float(ord)
    group, kinds = first._process_group, [(dtype or one.dtype).to_real() for one in tensors]
    wide = functools.reduce(torch.promote_types, kinds, torch.float32)
    for kind in {one.dtype for one in tensors}:
        if dtype is not None or not kind.is_floating_point:
            foreach_norm([torch.ones(1, dtype=kind)], order, dtype=dtype)  # raises on every rank where torch would
    parts = [_counted_once(one) for one in tensors]
    flat = [part for each in parts for part in each]
    norms = iter(foreach_norm(flat, order, dtype=wide) if flat else ())
    rows = group_chunks((dist.get_world_size(group), len(tensors)), 0, first)
    device = result_frame(rows, wide, group).device
    empty = torch.full((), math.inf if order < 0 else 0.0, dtype=wide, device=device)
    own = torch.stack([_joined([next(norms).to(device) for _ in each] or [empty], order) for each in parts])
    everywhere = Layout.whole(rows.size, group_places(first._layout, group))
    plan, said = make_plan(rows, everywhere), _said(tuple(one._layout for one in tensors), order)
    (all_norms,) = move(plan, [own[None]], group, dtype=wide, ready=functools.partial(record_call, group, said)).wait()
    totals = _joined(all_norms, order)
    scalar = Layout.whole(torch.Size(), everywhere.places)
    return [
        assemble(type(one), result_frame(scalar, kind, group), [total.to(kind)], [], records=False)
        for one, kind, total in zip(tensors, kinds, totals.unbind(0), strict=True)
    ]


@functools.lru_cache(maxsize=256)
def _said(layouts: tuple[Layout, ...], order: float) -> CallFingerprint:
    """What ranks compare of norms."""

    def fields() -> Fields:
        listed = {f"tensor {k}": layout.outline for k, layout in enumerate(layouts)}
        return {"verb": "norms of tensors", "order": order, **listed}

    digest = hashlib.blake2b(b"".join(layout.digest for layout in layouts), digest_size=DIGEST)
    digest.update(f"norms of order {order}".encode())
    return CallFingerprint(fields, digest.digest())


def _counted_once(tensor: ShardedTensor) -> list[torch.Tensor]:
    """The local tensors of a tensor that have elements, without those of which another replica counts; as reals."""
    layout, pairs = tensor._layout, zip(tensor._frame.rows, tensor._local_tensors(), strict=True)
    found = [local.detach() for row, local in pairs if local.numel() and layout.is_first(row)]
    return [one.abs() for one in found] if tensor.dtype.is_complex else found


def _joined(norms: torch.Tensor | Sequence[torch.Tensor], order: float) -> torch.Tensor:
    """The norm of a vector, or of several, from the norms of its parts, which are in a list or the first dim."""
    if len(norms) == 1:
        return norms[0]
    each = norms if isinstance(norms, torch.Tensor) else torch.stack(list(norms))
    return each.sum(0) if order == 0 else torch.linalg.vector_norm(each, order, 0)


def _power_sum(x: torch.Tensor, ord: Any = 2, dtype: torch.dtype | None = None) -> torch.Tensor:
    return x.abs().pow(ord).sum(dtype=dtype)


ALONE: dict[str, Callable[..., Any]] = {
    "maximum": _extreme(torch.maximum),
    "minimum": _extreme(torch.minimum),
    "maximum_": _written(_extreme(torch.maximum)),
    "minimum_": _written(_extreme(torch.minimum)),
    **{name: _with_value(getattr(torch.Tensor, name)) for name in ("addcmul", "addcdiv", "addcmul_", "addcdiv_")},
    "norm": _norm,
    "powsum": _power_sum,
}


def _is_elementwise(name: str) -> bool:
    """Whether the function for one tensor is pointwise, so that it may be computed shard by shard."""
    packet = getattr(aten, name, None)
    pointwise = packet is not None and any(is_pointwise(getattr(packet, overload)) for overload in packet.overloads())
    return name in UNTAGGED or (pointwise and name not in ("max", "norm"))


for _name in sorted(dir(torch)):
    if _name.startswith("_foreach_"):
        _bare = _name.removeprefix("_foreach_")
        _owner = torch.Tensor if _bare.endswith("_") else torch
        _register(
            _name,
            ALONE.get(_bare) or getattr(_owner, _bare),
            on_shards=_is_elementwise(_bare.removesuffix("_")),
            together=_norms if _bare == "norm" else None,
        )
# Optimizers and `clip_grad_norm_` then call these functions by default, where they do so for plain tensors.
for _types in (optimizer_foreach_types, clipping_foreach_types):
    if ShardedTensor not in _types:
        _types.append(ShardedTensor)
for _name in ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_"):
    if hasattr(torch, _name):
        _register_fused(getattr(torch, _name))
