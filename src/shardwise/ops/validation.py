"""`validation`: which checks between ranks are made. Those of plain operands' values are made here.

A plain operand must be the same on every rank, which no rank can see alone. So with ``values=True`` every call of
torch that takes sharded and plain tensors together is watched by a torch function mode, and a hash of each plain one is
compared between the ranks before the call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode, get_testing_overrides
from torch.utils import _pytree as pytree

from shardwise import settings
from shardwise.dispatch import Distributed, op_name
from shardwise.errors import PlainValueError
from shardwise.process_group import Fields, group_ranks, in_step_sharing, talks
from shardwise.sharded_tensor import ShardedTensorBase
from shardwise.value_digest import digest

BATCH = {"input", "indices", "offsets", "per_sample_weights"}  # arguments that may be each rank's own, in these ops:
OF_OWN_BATCHES = {functional.linear, functional.embedding, functional.embedding_bag}
OF_OWN_BATCHES |= {torch.embedding, torch.embedding_bag}


@contextmanager
def validation(enabled: bool = True, *, values: bool = False, strict: bool = False) -> Iterator[None]:
    """Within this context, which checks between ranks are made. Must be the same on every rank.

    By default ranks compare, by digest, what they are about to do wherever a tensor is made, saved or moved by a verb.
    Ops, backwards and steps of optimizers send nothing for it: each rank keeps a chain of digests of what it does.
    Ranks compare their chains where they meet, and a rank that waits for a second looks what the others wait in. Off,
    nothing is sent that is not data, and ranks that disagree may not be found out.

    With ``strict``, for debugging, they also compare before every op that sends something, and every transfer of a
    backward: ranks that differ raise there, at once, at the cost of a small message each time.

    With ``values``, for debugging, they are strict, and also compare a hash of every plain tensor that is used together
    with sharded ones: it must be the same on every rank, as it is not after an unseeded `torch.rand`, or where a rank
    passes its own batch without `from_local`. They are compared bit by bit. The error names the op, the argument and
    the ranks. Every such call waits for all ranks, and reads all of the plain tensor. What runs within a backward, such
    as a checkpoint that computes again, is not compared::

        >>> with shardwise.validation(values=True):
        ...     y = shardwise.ones(0, 4, 2) * torch.tensor([1.0, 2.0])  # a plain tensor, the same on every rank
    """
    strict, enabled = strict or values, enabled or strict or values
    with settings.changed(validate=enabled, strict=strict), _ValuesCompared() if values else nullcontext():
        yield


class _ValuesCompared(TorchFunctionMode):
    """Sees every call of torch in this thread, and compares the plain operands of those that have sharded ones."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in ("__get__", "__set__", "__delete__"):
            _compare(func, args, kwargs)
        return func(*args, **kwargs)


def _compare(op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    leaves = pytree.tree_leaves_with_path((tuple(args), kwargs))
    sharded = next((leaf for _, leaf in leaves if isinstance(leaf, ShardedTensorBase)), None)
    own = settings.current().own_batches and op in OF_OWN_BATCHES
    plain = [
        (path, leaf)
        for path, leaf in leaves
        if _is_plain(leaf) and not _is_destination(op, path) and not (own and _name(op, path) in BATCH)
    ]
    group = None if sharded is None else sharded._process_group
    if not plain or group is None or not talks(group):
        return

    def work() -> tuple[None, Fields, list[str]]:
        about = [f"{tuple(leaf.shape)} {leaf.dtype}" for _, leaf in plain]
        return (
            None,
            {"op": op_name(op), "operands": len(plain)},
            [f"{said} {digest(leaf, None)}" for said, (_, leaf) in zip(about, plain, strict=True)],
        )

    _, told = in_step_sharing(group, work, subject="a call with plain operands")
    for number, (path, _) in enumerate(plain):
        found = [hashes[number] for hashes in told]
        others = [rank for rank, one in zip(group_ranks(group), found, strict=True) if one != found[0]]
        if others:
            here, there = (str(one).rsplit(" ", 1)[0] for one in (found[0], next(o for o in found if o != found[0])))
            raise PlainValueError(
                f"{op_name(op)}: {_argument(op, path)} is a plain tensor, which must be the same on every rank, but on "
                f"{'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))} it differs from that on rank "
                f"{group_ranks(group)[0]}"
                + (f" ({there} there, {here} here)" if here != there else "")
                + ". Seed before you draw it; or, if each rank has its own part, say so with shardwise.from_local(x)"
            )


def _is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, Distributed) and not value.is_meta


def _is_destination(op: Callable[..., Any], path: Sequence[Any]) -> bool:
    """Whether an argument is written into, whatever it holds."""
    first = path[1]
    by_name = isinstance(first, pytree.MappingKey) and first.key == "out"
    return by_name or (op is torch.Tensor.copy_ and isinstance(first, pytree.SequenceKey) and first.idx == 0)


def _argument(op: Callable[..., Any], path: Sequence[Any]) -> str:
    """An argument, and where in it."""
    name = _name(op, path)
    return f"argument {name if isinstance(name, int) else repr(name)}{pytree.keystr(tuple(path[2:]))}"


def _name(op: Callable[..., Any], path: Sequence[Any]) -> str | int:
    """The name of an argument, as torch declares it, from its place in ``(args, kwargs)``; else its number."""
    first: Any = path[1]
    if isinstance(first, pytree.MappingKey):
        return str(first.key)
    names, place = _names(op), int(first.idx)
    return names[place] if place < len(names) else place


@lru_cache(maxsize=256)
def _names(op: Callable[..., Any]) -> tuple[str, ...]:
    """The names of an op's arguments: functions of C have none, but torch keeps a stand-in of each for its tests."""
    try:
        found = inspect.signature(get_testing_overrides().get(op, op))
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, parameter in found.parameters.items() if parameter.kind in kinds)
