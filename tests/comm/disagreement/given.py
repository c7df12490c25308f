"""What the verbs of the table are given: tensors, graphs, models, optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import chunks
from tests.patience import until
from torch import nn
from torch.nn import functional

import shardwise
from shardwise import ShardedOptimizer, ShardingPlan
from shardwise.comm.group import tagged_messages
from shardwise.comm.peers import status
from shardwise.tensor import Shard, shard_tensor

WORLD = 3
ODD = 1  # the rank that does otherwise
ROWS, COLUMNS = chunks(0, 0, 1, 2), chunks(1, 0, 1, 2)
PLAIN = torch.arange(54.0).reshape(9, 6)
WRONG: Any = "wrong"
PLACES = [f"rank:{rank}/cpu" for rank in range(WORLD)]


def rank() -> int:
    """This rank."""
    return dist.get_rank()


def as_dtype(dtype: torch.dtype) -> Any:
    """A tensor that differs in its dtype alone."""
    return shard_tensor(PLAIN.to(dtype), ROWS)


def with_ints() -> tuple[Any, Any]:
    """A tensor, and one of the same layout whose bytes mean something else."""
    return as_dtype(torch.float32), as_dtype(torch.int32)


def misshaped(tensor: Any) -> Any:
    """The tensor, after its shard was given a tensor of another size."""
    tensor.local_shards()[0].tensor = torch.zeros(1)
    return tensor


def two_layouts() -> tuple[Any, Any]:
    """Two tensors of one size."""
    return shard_tensor(PLAIN, ROWS), shard_tensor(PLAIN + 1, COLUMNS)


def recorded() -> tuple[Any, Any]:
    """A leaf and a loss whose backward moves gradients."""
    leaf = shard_tensor(PLAIN, ROWS).requires_grad_()
    return leaf, (leaf.redistribute(COLUMNS) * 2).redistribute(ROWS)


def plain_weight() -> tuple[Any, Any]:
    """A plain weight and a result whose backward adds its gradient up."""
    weight = torch.ones(6, 6, requires_grad=True)
    return weight, shard_tensor(PLAIN, ROWS) @ weight


def replicated() -> tuple[Any, Any]:
    """A leaf with replicas, whose gradients are added up, and a result."""
    leaf = shard_tensor(PLAIN, shardwise.ReplicatedShardingSpec(PLACES)).requires_grad_()
    return leaf, leaf * 2


def looked_up() -> tuple[Any, Any]:
    """A table and rows of it."""
    table = shard_tensor(PLAIN, ROWS).requires_grad_()
    return table, functional.embedding(shardwise.from_local(torch.tensor([rank(), 8])), table)


def backward_of(pair: tuple[Any, Any], scale: float = 1) -> None:
    """From a result that is not a scalar."""
    pair[1].backward(torch.ones_like(pair[1]) * scale)


def whole_twice() -> tuple[Any, Any]:
    """What is differentiable twice, of a whole tensor."""
    leaf = shard_tensor(PLAIN, ROWS).requires_grad_()
    (grad,) = torch.autograd.grad((leaf.full_tensor() ** 3).sum(), leaf, create_graph=True)
    return leaf, grad


def model() -> Any:
    """A small one, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6))


def buffered() -> nn.Module:
    """With a buffer that no checkpoint holds."""
    made = nn.Module()
    made.register_buffer("frequencies", PLAIN.clone(), persistent=False)
    return made


def sharded_model() -> Any:
    """With both weights sharded."""
    made = model()
    shardwise.shard_module(made, ShardingPlan({"0.weight": ROWS, "2.weight": COLUMNS}))
    return made


def trained(kind: Any = torch.optim.AdamW) -> Any:
    """A model with gradients, and its optimizer."""
    made = sharded_model()
    made(PLAIN).pow(2).mean().backward()
    weights = {name: one for name, one in made.named_parameters() if one.ndim == 2}
    optimizer = ShardedOptimizer(weights, kind, lr=0.1)
    optimizer.step()
    return made, optimizer


def muon() -> Any:
    """An optimizer to which whole parameters come."""
    return trained(torch.optim.Muon)


def drop(made: dict[str, Any]) -> dict[str, Any]:
    """A state dict that lacks a parameter."""
    made["state"].pop("0.weight")
    return made


def shards(size: int) -> list[Shard]:
    """This rank's, of a tensor in three parts."""
    return [Shard.from_tensor_and_offsets(torch.ones(size, 2), [3 * rank(), 0], rank())]


def failing(optimizer: Any) -> Any:
    """An optimizer with a hook that raises."""

    def hook(*_: Any) -> None:
        raise ZeroDivisionError("in a hook")

    optimizer.register_state_dict_pre_hook(hook)
    return optimizer


def backward_with_a_hook_that_raises(pair: tuple[Any, Any]) -> None:
    """In the middle of the backward, where the others move gradients."""

    def hook(_: Any) -> None:
        raise ZeroDivisionError("in a hook")

    hooked = pair[1] * 1
    hooked.register_hook(hook)
    backward_of((pair[0], hooked))


def amp() -> tuple[Any, Any, Any]:
    """A scaler, with an optimizer of torch and scaled gradients."""
    made = sharded_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(made(PLAIN).pow(2).mean()).backward()
    return scaler, torch.optim.SGD(made.parameters(), lr=0.1), made


def compared(given: Any, value: float) -> Any:
    """An op whose plain operand is compared."""
    with shardwise.validation(values=True):
        return given + torch.full((6,), value)


def drawn(tensor: Any, dtype: torch.dtype | None = None) -> Any:
    """Random numbers, alike on replicas."""
    return torch.rand_like(tensor, dtype=dtype)


def mesh() -> Any:
    """All ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (WORLD,)), shard_tensor(PLAIN, ROWS)


@contextmanager
def impatient() -> Iterator[None]:
    """Ranks that wait look soon what the others are doing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tagged_messages, "PATIENCE", 0.05)
        patch.setattr(tagged_messages, "AT_MOST", 0.08)
        yield


@contextmanager
def looked_for() -> Iterator[Callable[[], None]]:
    """Ranks that wait look soon what the others are doing. Gives what a rank calls to be late: it comes back when all
    others have looked for word of it."""
    store, find_verdict = dist.distributed_c10d._get_default_store(), status.find_verdict

    def counted(*given: Any) -> Exception | None:
        found = find_verdict(*given)
        store.add(f"looks of rank {rank()}", 1)
        return found

    def looks() -> list[int]:
        others = set(range(dist.get_world_size())) - {rank()}
        return [store.add(f"looks of rank {other}", 0) for other in others]

    def be_late() -> None:
        before = looks()
        until(lambda: all(now > then + 1 for now, then in zip(looks(), before, strict=True)))

    with impatient(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(status, "find_verdict", counted)
        yield be_late
