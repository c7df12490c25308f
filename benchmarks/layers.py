"""Linear layers and a training step on four ranks, against DTensor's tensor parallelism and one written by hand."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 # as everybody calls it
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise
from benchmarks.ops import grad_of, mesh_of_all, our_specs, race
from benchmarks.table import Row
from benchmarks.timing import Work

Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

FEATURES, BATCH = 1_024, 256


class SumOverRanks(torch.autograd.Function):
    """What hand-written tensor parallelism is made of: add up going forward, pass on going back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        dist.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


sum_over_ranks: Callable[[Tensor], Tensor] = SumOverRanks.apply  # which torch declares without types


def linear() -> list[Row]:
    """The same batch on every rank; the loss is a square's sum over all of the result, known to every rank in the end.

    Cut on dim 0, the result is cut as well; on dim 1, its parts are added up: by the others on every rank, by us each
    rank a part of it.
    """
    warnings.simplefilter("ignore")
    world, rank, mesh = dist.get_world_size(), dist.get_rank(), mesh_of_all()
    x, values = torch.rand(BATCH, FEATURES), torch.randn(FEATURES, FEATURES) / FEATURES**0.5
    plain = values.clone().requires_grad_()
    loss = F.linear(x, plain).square().sum()
    loss.backward()
    rows = []
    for dim, style in enumerate((ColwiseParallel(), RowwiseParallel(input_layouts=Replicate()))):
        expected = loss, grad_of(plain).chunk(world, dim)[rank]
        part = values.chunk(world, dim)[rank].clone(memory_format=torch.contiguous_format).requires_grad_()
        sharded = shardwise.tensor.shard_tensor(values, our_specs()[dim]).requires_grad_()
        module = parallelize_module(linear_layer(values), mesh, style)
        contenders = {
            "shardwise": functools.partial(our_linear, shardwise.tensor.shard_tensor(x, our_specs()[2]), sharded),
            "by hand": functools.partial(linear_by_hand, x, part, dim),
            "DTensor": functools.partial(dtensor_linear, x, module, dim),
        }
        what = f"linear {FEATURES}x{FEATURES} cut on dim {dim}, batch {BATCH}, {world} ranks, fwd + bwd"
        rows.append(race(what, contenders, lambda expected=expected: expected))  # type: ignore[misc] # bound now
    return rows


def linear_layer(values: Tensor) -> nn.Linear:
    module = nn.Linear(FEATURES, FEATURES, bias=False)
    module.weight = nn.Parameter(values.clone())
    return module


def our_linear(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    weight.grad = None
    loss = F.linear(x, weight).square().sum()
    loss.backward()
    return loss, grad_of(weight)


def linear_by_hand(x: Tensor, weight: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    weight.grad = None
    if dim == 0:
        return finished(F.linear(x, weight), weight, cut=True)
    mine = x.chunk(dist.get_world_size(), 1)[dist.get_rank()]
    return finished(sum_over_ranks(F.linear(mine, weight)), weight, cut=False)


def dtensor_linear(x: Tensor, module: nn.Module, dim: int) -> tuple[Tensor, Tensor]:
    """As `torch.distributed.tensor.parallel` is used: what comes out is this rank's plain tensor."""
    weight: Any = module.weight
    weight.grad = None
    return finished(module(x), weight, cut=dim == 0)


def finished(out: Tensor, weight: Tensor, *, cut: bool) -> tuple[Tensor, Tensor]:
    """The loss on this rank, its backward, and the loss of all ranks where each has a part of the result."""
    loss = out.square().sum()
    loss.backward()
    loss = loss.detach()
    if cut:
        dist.all_reduce(loss)
    return loss, grad_of(weight)


# A training step ------------------------------------------------------------------------------------------------------


def training() -> list[Row]:
    """Linear, relu, linear, mse loss, backward, optimizer; the first weight cut on dim 0, the second on dim 1."""
    warnings.simplefilter("ignore")
    x, y = torch.rand(BATCH, FEATURES), torch.rand(BATCH, FEATURES)
    weights = [torch.randn(FEATURES, FEATURES) / FEATURES**0.5 for _ in range(2)]
    sgd: Optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    adamw: Optimizer = functools.partial(torch.optim.AdamW, lr=1e-4)
    rows = []
    for name, optimizer, on_shards in (("SGD", sgd, False), ("AdamW", adamw, False), ("AdamW on shards", adamw, True)):
        contenders = {
            "shardwise": our_training(x, y, weights, optimizer, on_shards=on_shards),
            "by hand": training_by_hand(x, y, weights, optimizer),
            "DTensor": dtensor_training(x, y, weights, optimizer),
        }
        reference = plain_training(x, y, weights, optimizer)
        what = f"training step of 2 layers {FEATURES}x{FEATURES}, batch {BATCH}, {dist.get_world_size()} ranks, {name}"
        rows.append(race(what, contenders, reference))
    return rows


def training_step(model: Callable[[Any], Any], x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """The same for everybody, whatever kinds of tensors these are."""
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def our_training(x: Tensor, y: Tensor, weights: list[Tensor], optimizer: Optimizer, *, on_shards: bool) -> Work:
    """With ``on_shards``, the optimizer is handed the local tensors, and does not know that they are parts."""
    specs = our_specs()
    first, second = (
        shardwise.tensor.shard_tensor(w, spec).requires_grad_() for w, spec in zip(weights, specs, strict=False)
    )
    x, y = (shardwise.tensor.shard_tensor(tensor, specs[2]) for tensor in (x, y))
    parameters = [weight.local_tensor() if on_shards else weight for weight in (first, second)]

    def model(x: Tensor) -> Tensor:
        return F.linear(torch.relu(F.linear(x, first)), second)

    return functools.partial(training_step, model, x, y, optimizer(parameters))


def training_by_hand(x: Tensor, y: Tensor, weights: list[Tensor], optimizer: Optimizer) -> Work:
    first, second = (
        weight.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone(memory_format=torch.contiguous_format)
        for dim, weight in enumerate(weights)
    )
    parameters = [first.requires_grad_(), second.requires_grad_()]

    def model(x: Tensor) -> Tensor:
        return sum_over_ranks(F.linear(torch.relu(F.linear(x, first)), second))

    return functools.partial(training_step, model, x, y, optimizer(parameters))


def dtensor_training(x: Tensor, y: Tensor, weights: list[Tensor], optimizer: Optimizer) -> Work:
    model = nn.Sequential(linear_layer(weights[0]), nn.ReLU(), linear_layer(weights[1]))
    parallelize_module(model, mesh_of_all(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return functools.partial(training_step, model, x, y, optimizer(model.parameters()))


def plain_training(x: Tensor, y: Tensor, weights: list[Tensor], optimizer: Optimizer) -> Work:
    model = nn.Sequential(linear_layer(weights[0]), nn.ReLU(), linear_layer(weights[1]))
    return functools.partial(training_step, model, x, y, optimizer(model.parameters()))
