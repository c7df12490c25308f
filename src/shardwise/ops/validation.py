"""`validation`: which checks between ranks are made; and the check of the values of plain operands.

A plain operand must be the same on every rank, which no rank can see alone. So with ``values=True`` a torch function
mode sees every call that takes sharded and plain tensors together, and ranks compare a hash of each plain one before
the call.
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

from shardwise import settings
from shardwise.comm.agreement import in_step_sharing
from shardwise.comm.group import Fields, group_ranks, talks
from shardwise.comm.value_digest import digest
from shardwise.errors import PlainValueError
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import Distributed, op_name
from shardwise.torch_private import pytree

OWN_BATCH_ARGUMENTS = {"input", "indices", "offsets", "per_sample_weights"}  # each rank's own, under own_batches, in:
OWN_BATCH_OPS = {functional.linear, functional.embedding, functional.embedding_bag}
OWN_BATCH_OPS |= {torch.embedding, torch.embedding_bag}


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
    """Compares the plain operands of every call of torch in this thread that also has sharded ones."""

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
    own = settings.current().own_batches and op in OWN_BATCH_OPS
    plain = [
        (path, leaf)
        for path, leaf in leaves
        if _is_plain(leaf) and not _is_destination(op, path) and not (own and _name(op, path) in OWN_BATCH_ARGUMENTS)
    ]
    group = None if sharded is None else sharded._process_group
    if not plain or group is None or not talks(group):
        return

    def work() -> tuple[None, Fields, list[str]]:
        about = [f"{tuple(leaf.shape)} {leaf.dtype}" for _, leaf in plain]
        return (
            None,
            {"op": op_name(op), "operands": len(plain)},
            [f"{one} {digest(leaf, None)}" for one, (_, leaf) in zip(about, plain, strict=True)],
        )

    _, of_ranks = in_step_sharing(group, work, subject="a call with plain operands")
    for number, (path, _) in enumerate(plain):
        digests = [one[number] for one in of_ranks]
        others = [rank for rank, one in zip(group_ranks(group), digests, strict=True) if one != digests[0]]
        if others:
            other = next(one for one in digests if one != digests[0])
            here, there = (str(one).rsplit(" ", 1)[0] for one in (digests[0], other))
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
    """Whether an argument is only written into."""
    first = path[1]
    by_name = isinstance(first, pytree.MappingKey) and first.key == "out"
    return by_name or (op is torch.Tensor.copy_ and isinstance(first, pytree.SequenceKey) and first.idx == 0)


def _argument(op: Callable[..., Any], path: Sequence[Any]) -> str:
    """The argument and the position within it, for an error."""
    name = _name(op, path)
    return f"argument {name if isinstance(name, int) else repr(name)}{pytree.keystr(tuple(path[2:]))}"


def _name(op: Callable[..., Any], path: Sequence[Any]) -> str | int:
    """The name that torch declares for an argument at a path in ``(args, kwargs)``; else its number."""
    first: Any = path[1]
    if isinstance(first, pytree.MappingKey):
        return str(first.key)
    names, position = _names(op), int(first.idx)
    return names[position] if position < len(names) else position


@lru_cache(maxsize=256)
def _names(op: Callable[..., Any]) -> tuple[str, ...]:
    """The names of an op's arguments; for functions of C, those of the stand-ins in torch's own tests."""
    try:
        signature = inspect.signature(get_testing_overrides().get(op, op))
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, parameter in signature.parameters.items() if parameter.kind in kinds)
