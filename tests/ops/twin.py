"""Functions and modules on sharded tensors beside their plain twins, in float64 and with nothing gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.cases import boxes, chunks, parts
from torch import nn
from torch.utils import _pytree as pytree

import shardwise
from shardwise import ReplicatedShardingSpec, ShardingSpec
from shardwise.nn import shard_parameter
from shardwise.tensor import shard_tensor

Layouts = Callable[[torch.Size], ShardingSpec | None]  # None: plain


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    """The same numbers on every rank."""
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def plain(size: torch.Size) -> None:
    """Not sharded."""


def along(dim: int, *ranks: int) -> Layouts:
    """Chunks of a dim, of the last one if there are fewer."""
    return lambda size: chunks(min(dim, len(size) - 1), *ranks)


def uneven(size: torch.Size) -> ShardingSpec:
    """Three boxes on two ranks, of which one is a row, and one a column of what is left; of one dim two."""
    rows, rest = size[0], list(size[2:])
    zeros = [0] * len(rest)
    if len(size) == 1 or size[1] == 1:
        head = list(size[1:])
        return boxes(([0] * len(size), [1, *head], 1), ([1, *[0] * len(head)], [rows - 1, *head], 0))
    columns = size[1]
    return boxes(
        ([0, 0, *zeros], [1, columns, *rest], 0),
        ([1, 0, *zeros], [rows - 1, 1, *rest], 1),
        ([1, 1, *zeros], [rows - 1, columns - 1, *rest], 0),
    )


def replicated(size: torch.Size) -> ShardingSpec:
    """All of it on two ranks."""
    return ReplicatedShardingSpec(["rank:0/cpu", "rank:1/cpu"])


ROWS, COLUMNS = along(0, 0, 1), along(1, 1, 0)
SEVERAL = along(0, 1, 0, 1)
TWO: dict[str, Layouts] = {
    "rows": ROWS,
    "columns": COLUMNS,
    "uneven": uneven,
    "several per rank": SEVERAL,
    "replicated": replicated,
}


def sharded(tensor: torch.Tensor, layouts: Layouts) -> torch.Tensor:
    """A leaf of the same value, which asks for a gradient if it can have one."""
    spec = layouts(tensor.shape)
    made: torch.Tensor = tensor.clone() if spec is None else shard_tensor(tensor, spec)
    return made.requires_grad_() if tensor.is_floating_point() else made


def assert_alike(found: Any, expected: Any, what: str) -> tuple[Any, Any]:
    """That all results are the same; two losses of them to go back from."""
    losses: list[Any] = [0, 0]
    mine, theirs = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    for k, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        assert one.dtype == other.dtype, what
        _assert_close(one, other, f"{what}, result {k}")
        if other.requires_grad:
            weights = normal(*other.shape, seed=k + 7)
            losses[0] = losses[0] + (one * weights).sum()
            losses[1] = losses[1] + (other * weights).sum()
    return losses[0], losses[1]


def _assert_close(found: Any, expected: torch.Tensor, what: str) -> None:
    """Each shard where it lies, to what floats of that length can tell."""
    if isinstance(expected, shardwise.ShardedTensor):  # of plain operands and an index that is not
        expected = expected.detach().full_tensor()
    pairs = [(found, expected)]
    if isinstance(found, shardwise.ShardedTensor):
        pairs = parts(found, expected, what)
    for one, other in pairs:
        torch.testing.assert_close(one.detach(), other.detach(), msg=lambda text: f"{what}: {text}")


def go_back(losses: tuple[Any, Any], pairs: Sequence[tuple[Any, Any]], what: str) -> None:
    """That both losses give all leaves the same gradients."""
    if not isinstance(losses[1], torch.Tensor):
        return
    for loss in losses:
        loss.backward()
    for k, (one, other) in enumerate(pairs):
        assert (one.grad is None) == (other.grad is None), f"{what}, gradient {k}"
        if other.grad is not None:
            _assert_close(one.grad, other.grad, f"{what}, gradient {k}")


def assert_same(function: Callable[..., Any], operands: Sequence[tuple[torch.Tensor, Layouts]], what: str) -> Any:
    """That a function gives on sharded operands what it gives on plain ones, and gradients; the sharded result."""
    plains = [sharded(tensor, plain) for tensor, _ in operands]
    tensors = [sharded(tensor, layouts) for tensor, layouts in operands]
    with shardwise.gather_budget(0):
        found = function(*tensors)
        go_back(assert_alike(found, function(*plains), what), list(zip(tensors, plains, strict=True)), what)
    return found


def assert_same_module(
    make: Callable[[], nn.Module],
    operands: Sequence[tuple[torch.Tensor, Layouts]],
    layouts: Layouts,
    what: str,
    call: Callable[..., Any] = lambda module, *args: module(*args),
) -> None:
    """The same for a module whose parameters are sharded."""
    torch.manual_seed(0)
    twin = make().double()
    torch.manual_seed(0)
    module = make().double()
    for name, parameter in list(module.named_parameters()):
        spec = layouts(parameter.shape)
        if spec is not None:
            shard_parameter(module, name, spec)
    plains = [sharded(tensor, plain) for tensor, _ in operands]
    tensors = [sharded(tensor, each) for tensor, each in operands]
    with shardwise.gather_budget(0):
        losses = assert_alike(call(module, *tensors), call(twin, *plains), what)
        leaves = zip([*module.parameters(), *tensors], [*twin.parameters(), *plains], strict=True)
        go_back(losses, list(leaves), what)
