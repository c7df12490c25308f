"""`validation`: which checks between ranks are made; and the check of the values of plain operands.

A plain operand must be the same on every rank, which no rank can see alone. So with ``values=True`` a torch function
mode sees every call that takes sharded and plain tensors together, and ranks compare a hash of each plain one before
the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.overrides import TorchFunctionMode

from shardwise import settings
from shardwise.comm.agreement import in_step_sharing
from shardwise.comm.group import Fields, group_ranks, talks
from shardwise.comm.peers import PLAIN_VALUE
from shardwise.comm.value_digest import digest
from shardwise.errors import PlainValueError
from shardwise.ops.engine.plain_values import ADVICE, argument, plain_operands
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import op_name
from shardwise.torch_private import pytree


@contextmanager
def validation(enabled: bool = True, *, values: bool | None = None, strict: bool = False) -> Iterator[None]:
    """Within this context, which checks between ranks are made. Must be the same on every rank.

    By default ranks compare, by digest, what they are about to do wherever a tensor is made, saved or moved by a verb.
    Ops, backwards and steps of optimizers send nothing for it: each rank keeps a chain of digests of what it does.
    Ranks compare their chains where they meet, and a rank that waits for a second looks what the others wait in. Off,
    nothing is sent that is not data, and ranks that disagree may not be found out.

    With ``strict``, for debugging, they also compare before every op that sends something, and every transfer of a
    backward: ranks that differ raise there, at once, at the cost of a small message each time.

    A plain tensor that is used together with sharded ones must be the same on every rank, as it is not after an
    unseeded `torch.rand`, or where a rank passes its own batch without `from_local`. In the first three calls of a
    function with plain tensors of some sizes, a few digits of them are compared, with all else; with ``values=False``
    they are not. With ``values=True``, for debugging, checks are strict, and compare every such tensor in every call,
    bit by bit: each of these calls waits for all ranks, and reads all of the tensor. The error names the op, the
    argument and the ranks. What runs within a backward, such as a checkpoint that computes again, is not compared::

        >>> with shardwise.validation(values=True):
        ...     y = shardwise.ones(0, 4, 2) * torch.tensor([1.0, 2.0])  # a plain tensor, the same on every rank
    """
    strict, enabled = strict or bool(values), enabled or strict or bool(values)
    mode = _ValuesCompared() if values else nullcontext()
    with settings.changed(validate=enabled, strict=strict, compares_first=values is None), mode:
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
    plain = list(plain_operands(op, leaves))
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
                f"{op_name(op)}: {argument(op, path)} {PLAIN_VALUE}, but on "
                f"{'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))} it differs from that on rank "
                f"{group_ranks(group)[0]}"
                + (f" ({there} there, {here} here)" if here != there else "")
                + f". {ADVICE[0].upper()}{ADVICE[1:]}"
            )
