"""`torch._foreach_*` and `torch._fused_*`: lists of tensors at once, in which sharded ones stand for their shards."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.dispatch import Op, registry
from shardwise.errors import PropertyError, ViewWriteError
from shardwise.sharded_tensor import ShardedTensor, ShardedTensorBase
from shardwise.sharded_tensor.gradients import recorded

REDUCTIONS = {"_foreach_norm", "_foreach_max", "_foreach_powsum"}  # one value for each tensor, not for each shard


def _shards(one: Any, model: Any) -> list[torch.Tensor]:
    """The tensors that stand for one entry of a list; where there are none, an empty one, to learn the dtype from."""
    if not isinstance(one, ShardedTensorBase):
        return [one]
    mine = one._local_tensors()
    if one is model and mine:
        return mine
    if not isinstance(model, ShardedTensorBase):
        raise PropertyError("a foreach function was given a sharded tensor where the first list has a plain one")
    return model._locals_of(one) or [torch.empty(0, dtype=one.dtype)]


def _ready(one: Any) -> Any:
    """A tensor to compute with: a leaf with replicas by way of what gives each of them the whole gradient."""
    if not isinstance(one, ShardedTensorBase) or not one._layout.has_replicas or not one.requires_grad:
        return one
    return one._derived(one._frame, *recorded(one))


def _value(arg: Any) -> Any:
    """A number in a sharded tensor, as a plain one."""
    return arg.full_tensor() if isinstance(arg, ShardedTensor) else arg


def _parts(plain: Any, model: Any) -> list[Any]:
    """What a plain entry of a list, the same on every rank, is for each shard of the tensor that it goes with."""
    if not isinstance(model, ShardedTensorBase):
        return [plain]
    rows = model._frame.rows
    if not isinstance(plain, torch.Tensor) or not plain.ndim:
        return [plain] * max(len(rows), 1)
    wide = plain.expand(model.shape)
    return [wide[model._layout.boxes.index(row)] for row in rows] or [plain.reshape(-1)[:0]]


def _one_by_one(op: Op, args: Any, kwargs: Any) -> list[Any]:
    """The same for each tensor alone: all ranks then take part, and shards are moved where they must be."""
    name = op.__name__.removeprefix("_foreach_")
    function = getattr(torch.Tensor if name.endswith("_") else torch, name)
    columns = [arg if isinstance(arg, list | tuple) else [arg] * len(args[0]) for arg in args]
    if name.rstrip("_") in ("addcmul", "addcdiv") and len(columns) == 4:
        *columns, values = columns  # which these take by its name
        return [function(*row, value=value) for *row, value in zip(*columns, _numbers(values), strict=True)]
    return [function(*row, **kwargs) for row in zip(*columns, strict=True)]


def _numbers(values: Any) -> list[Any]:
    return [one.item() if isinstance(one, torch.Tensor) else one for one in values]


def _apart(first: Any, args: Any) -> bool:
    """Whether an entry of another list is cut otherwise than the tensor that it goes with."""
    lists = [arg for arg in args if isinstance(arg, list | tuple)]
    return any(
        isinstance(one, ShardedTensorBase) and not _cut_alike(one, model)
        for arg in lists
        for one, model in zip(arg, first, strict=False)
    )


def _cut_alike(one: ShardedTensorBase, model: Any) -> bool:
    if not isinstance(model, ShardedTensorBase):
        return False
    same = one._frame is model._frame or one._layout == model._layout
    return same or model._layout.order_of(one._layout) is not None


def _wants_gradients(values: Any) -> bool:
    """Whether a value beside the first list is plain, or a number, and wants a gradient."""
    if isinstance(values, list | tuple):
        return any(_wants_gradients(one) for one in values if not isinstance(one, ShardedTensorBase))
    return isinstance(values, torch.Tensor) and values.requires_grad and torch.is_grad_enabled()


def _require_writable(target: ShardedTensorBase, values: list[Any]) -> None:
    """Raise for a view of which some ranks hold nothing: they would not know of the graph of what is written."""
    recorded = torch.is_grad_enabled() and any(isinstance(one, torch.Tensor) and one.requires_grad for one in values)
    if target._view_of is not None and recorded:
        raise ViewWriteError(
            "torch._foreach functions do not write values that want a gradient into views of sharded tensors: write "
            "into one tensor at a time"
        )
    if target._view_of is not None or target._copy_of_view:
        target._require_writable()


def _register(op: Op, *, in_place: bool) -> None:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        if not isinstance(args[0], list | tuple):
            raise PropertyError(f"{op.__name__} needs a list of tensors first")
        others = (*args[1:], *kwargs.values())
        alone = not in_place and any(_wants_gradients(value) for value in others)
        if alone or (op.__name__.startswith("_foreach_") and _apart(args[0], others)):
            made = _one_by_one(op, args, kwargs)
            return None if in_place else made
        # With gradients, those of replicas are for all of them: see `recorded`.
        first = args[0] if in_place else [_ready(one) for one in args[0]]
        args = (first, *args[1:])
        counts = [len(_shards(one, one)) for one in first]
        for one in first if in_place else ():
            if isinstance(one, ShardedTensorBase):
                _require_writable(one, [value for arg in args[1:] if isinstance(arg, list | tuple) for value in arg])

        def flat(arg: Any) -> Any:
            """A list for each tensor as a list for each shard."""
            if not isinstance(arg, list | tuple):
                return _value(arg)
            if arg and len(arg) != len(first):  # an optimizer's state that it does not keep is an empty list
                raise PropertyError(f"{op.__name__} was given lists of {len(first)} and {len(arg)} tensors")
            leaves: list[Any] = []
            for one, model in zip(arg, first, strict=bool(arg)):
                leaves += _shards(one, model) if isinstance(one, ShardedTensorBase) else _parts(one, model)
            return leaves

        made = op(*map(flat, args), **{name: flat(value) for name, value in kwargs.items()})
        if in_place:
            return None
        found = iter(made)
        results = []
        for one, count in zip(first, counts, strict=True):
            pieces = [next(found) for _ in range(count)]
            if isinstance(one, ShardedTensorBase):
                results.append(one._like(pieces if one._local_tensors() else [], pieces[0].dtype))
            else:
                results.append(pieces[0])
        return tuple(results) if isinstance(made, tuple) else results

    registry.built_in[op] = handler


def _norms(types: Any, args: Any, kwargs: Any, process_group: Any) -> list[Any]:
    tensors, *rest = args
    order = rest[0] if rest else kwargs.get("ord", 2)
    return [torch.linalg.vector_norm(one, order, dtype=kwargs.get("dtype")) for one in tensors]


def _powers(types: Any, args: Any, kwargs: Any, process_group: Any) -> list[Any]:
    tensors, *rest = args
    order = rest[0] if rest else kwargs.get("ord", 2)
    return [one.abs().pow(order).sum(dtype=kwargs.get("dtype")) for one in tensors]


def _maxima(types: Any, args: Any, kwargs: Any, process_group: Any) -> list[Any]:
    return [one.max() for one in args[0]]


for _name in sorted(dir(torch)):
    if _name.startswith("_foreach_") and _name not in REDUCTIONS:
        _register(getattr(torch, _name), in_place=_name.endswith("_"))
for _name in ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_"):
    if hasattr(torch, _name):
        _register(getattr(torch, _name), in_place=True)
registry.built_in[torch._foreach_norm] = _norms
registry.built_in[torch._foreach_max] = _maxima
if hasattr(torch, "_foreach_powsum"):
    registry.built_in[torch._foreach_powsum] = _powers
