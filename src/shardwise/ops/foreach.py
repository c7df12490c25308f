"""`torch._foreach_*`: lists of tensors at once. Sharded ones stand for their shards, in one call."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.dispatch import Op, registry
from shardwise.errors import PropertyError
from shardwise.sharded_tensor import ShardedTensorBase


def _register(op: Op, *, in_place: bool) -> None:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        first = args[0]
        counts = [len(one._local_tensors()) if isinstance(one, ShardedTensorBase) else 1 for one in first]

        def flat(arg: Any) -> Any:
            """A list for each tensor as a list for each shard."""
            if isinstance(arg, ShardedTensorBase):
                raise PropertyError(f"{op.__name__} takes a sharded tensor only in a list")
            if not isinstance(arg, list | tuple):
                return arg
            if len(arg) != len(first):
                raise PropertyError(f"{op.__name__} was given lists of {len(first)} and {len(arg)} tensors")
            leaves: list[Any] = []
            for one, model, count in zip(arg, first, counts, strict=True):
                if isinstance(model, ShardedTensorBase) and isinstance(one, torch.Tensor) and one.ndim:
                    leaves += model._locals_of(one)
                elif isinstance(one, ShardedTensorBase):
                    raise PropertyError(
                        f"{op.__name__} was given a sharded tensor where the first list has a plain one"
                    )
                else:
                    leaves += [one] * count
            return leaves

        made = op(*map(flat, args), **{name: flat(value) for name, value in kwargs.items()}) if sum(counts) else None
        if in_place:
            return None
        found = iter(made or ())
        results = []
        for one, count in zip(first, counts, strict=True):
            pieces = [next(found) for _ in range(count)]
            results.append(
                one._like(pieces, pieces[0].dtype if pieces else None)
                if isinstance(one, ShardedTensorBase)
                else pieces[0]
            )
        return tuple(results) if isinstance(made, tuple) else results

    registry.built_in[op] = handler


def _norms(types: Any, args: Any, kwargs: Any, process_group: Any) -> list[Any]:
    """One norm for each whole tensor, not for each shard."""
    tensors, *rest = args
    order = rest[0] if rest else kwargs.get("ord", 2)
    return [torch.linalg.vector_norm(one, order, dtype=kwargs.get("dtype")) for one in tensors]


def _maxima(types: Any, args: Any, kwargs: Any, process_group: Any) -> list[Any]:
    return [one.max() for one in args[0]]


for _name in sorted(dir(torch)):
    if _name.startswith("_foreach_"):
        _register(getattr(torch, _name), in_place=_name.endswith("_"))
registry.built_in[torch._foreach_norm] = _norms
registry.built_in[torch._foreach_max] = _maxima
