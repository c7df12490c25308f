"""`backward(inputs=...)` and `torch.autograd.grad`: the same collectives run on every rank, whatever it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, SIZE, SPECS, assert_holds, boxes, chunks
from tests.ops.matrix import FAMILIES as MATRIX
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

from shardwise import ShardedTensor, ShardingSpec
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

X = torch.linspace(-1, 1, 42, dtype=torch.float64).reshape(SIZE)
Y = X.flip(0) * 2

# Two operands that lie on different ranks; also several shards on a rank, replicas, and ranks without either.
PAIRS: dict[str, tuple[ShardingSpec, ShardingSpec]] = {
    "one each": (chunks(0, 0), chunks(0, 1)),
    "one and two": (chunks(0, 0), chunks(0, 1, 2)),
    "several per rank": (SPECS["uneven, several per rank"], chunks(1, 1, 1, 3)),
    "replicas": (ALL["replicated"], boxes(([0, 0], [7, 6], 1))),
}


def both(pair: str) -> tuple[ShardedTensor, ShardedTensor]:
    """Two sharded leaves."""
    first, second = PAIRS[pair]
    return shard_tensor(X, first).requires_grad_(), shard_tensor(Y, second).requires_grad_()


def written(x: Any, y: Any) -> Any:
    """A tensor into which a part of another is written, and what is used of it was not."""
    made = x * 2
    made[:2] = y[3:5] * 3
    return made[1:]


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "pointwise": lambda x, y: (x * y).sin().sum(),
    "products": lambda x, y: (x @ y.t()).sin().mean(),
    "behind each other": lambda x, y: (torch.cat([x, y])[2:12].cos() @ torch.ones(6, 2, dtype=x.dtype)).sum(),
    "written": lambda x, y: (written(x, y).softmax(0) * X[1:]).sum(),
    "an unused part": lambda x, y: x[:1].exp().sum() + y[6].exp().sum(),
}


@pytest.mark.parametrize("pair", PAIRS)
@ranks(4)
def test_gradients_come_to_what_is_asked_for_alone(pair: str) -> None:
    """To either operand, to both, and from `torch.autograd.grad` the same."""
    for name, loss in LOSSES.items():
        for asked in ((0,), (1,), (1, 0)):
            plains = [value.clone().requires_grad_() for value in (X, Y)]
            tensors = both(pair)
            loss(*plains).backward(inputs=[plains[k] for k in asked])
            loss(*tensors).backward(inputs=[tensors[k] for k in asked])
            found = torch.autograd.grad(loss(*tensors), [tensors[k] for k in asked])
            for plain, tensor in zip(plains, tensors, strict=True):
                assert (tensor.grad is None) == (plain.grad is None), name
                if plain.grad is not None:
                    assert_holds(tensor.grad, plain.grad, name)
            for k, grad in zip(asked, found, strict=True):
                assert_holds(grad, plains[k].grad, name)


@ranks(4)
def test_a_result_that_is_asked_for_keeps_its_gradient() -> None:
    """As a plain result does, also on ranks that hold nothing of it; what lies behind it gets none."""
    x, _ = both("one and two")
    plain = X.clone().requires_grad_()
    results = []
    for leaf in (plain, x):
        result = leaf[1:3] * 2
        result.sin().sum().backward(inputs=[result])
        assert leaf.grad is None
        results.append(result.grad)
    assert_holds(results[1], results[0])


@ranks(2)
def test_an_input_without_a_graph_is_refused_by_every_rank() -> None:
    """Also by those that hold nothing of it; and no inputs at all."""
    x, y = (shard_tensor(value, chunks(0, 0)) for value in (X, Y))
    x.requires_grad_()
    with pytest.raises(RuntimeError, match="requires_grad=False"):
        (x * y).sum().backward(inputs=[y])
    with pytest.raises(RuntimeError, match="cannot be empty"):
        (x * y).sum().backward(inputs=[])


INDICES = torch.tensor([1, 4, 1, 0])
AMONG_OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    "written": written,
    "index_put": lambda x, y: x.index_put((INDICES,), y[:4], accumulate=True),
    "index_add": lambda x, y: x.index_add(0, INDICES, y[:4]),
    "index_copy": lambda x, y: x.index_copy(0, INDICES[1:], y[:3]),
    "scatter": lambda x, y: x.scatter(0, INDICES[None, :, None].expand(1, 4, 6)[0], y[:4]),
    "scatter_add": lambda x, y: x.scatter_add(0, INDICES[:, None].expand(4, 6), y[:4]),
    "masked_scatter": lambda x, y: x.masked_scatter(X > 0.2, y),
    "select_scatter": lambda x, y: x.select_scatter(y[0], 0, 2),
    "slice_scatter": lambda x, y: x.slice_scatter(y[:3], 0, 4, 7),
    "masked": lambda x, y: x[X > 0] + y[X > 0],
    "embedding": lambda x, y: F.embedding(INDICES, x) * y[:4],
    "cdist": torch.cdist,
    "cross_entropy": lambda x, y: F.cross_entropy(x, torch.arange(7) % 6, y[0].abs().detach()) * y[1],
    "layer_norm": lambda x, y: F.layer_norm(x, (6,), y[0], y[1]),
    "convolution": lambda x, y: F.conv1d(x[None], y[:, :, None].expand(7, 6, 2).permute(1, 0, 2)),
    "prelu": lambda x, y: F.prelu(x, y[0]),
    "bilinear": lambda x, y: F.bilinear(x, y, torch.ones(2, 6, 6, dtype=x.dtype)),
    "lerp": lambda x, y: x.lerp(y[:1], y[:, :1]),
    "unbind and stack": lambda x, y: torch.stack([*x.unbind(0)[:2], *y.unbind(0)[5:]]),
}
FAMILIES = {**MATRIX, "values among others": AMONG_OTHERS}


@pytest.mark.parametrize("family", FAMILIES)
@ranks(4)
def test_every_part_of_a_result_leads_to_every_operand(family: str) -> None:
    """On each rank, each shard of a result, or its anchor, reaches the same operands: no collective is left out."""
    for pair in ("one and two", "several per rank"):
        for name, function in FAMILIES[family].items():
            x, y = both(pair)
            result = function(x, y)
            if not result.requires_grad:
                continue
            locals_ = {"x": x._local_tensors() or [x._anchored()], "y": y._local_tensors() or [y._anchored()]}
            reached = [
                {key for key, own in locals_.items() if any(one is leaf for one in own for leaf in leaves)}
                for leaves in map(leaves_of, result._local_tensors() or [result._anchored()])
            ]
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, reached)
            assert len({frozenset(found) for rank in everyone for found in rank}) == 1, (pair, name, everyone)


def leaves_of(tensor: Any) -> list[torch.Tensor]:
    """The leaves to which the graph of a local tensor leads."""
    seen, ahead, found = set(), [tensor.grad_fn], [] if tensor.grad_fn else [tensor]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found += [node.variable] if hasattr(node, "variable") else []
        ahead += [function for function, _ in node.next_functions]
    return found
