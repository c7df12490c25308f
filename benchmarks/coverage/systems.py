"""The systems under test: how each makes a sharded tensor, gives it back whole, and goes backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardwise
from benchmarks.coverage.control import Control
from benchmarks.coverage.gathers import Gathers
from shardwise.ops.autograd.backward import backward

Weights = list[torch.Tensor | None]


class System(Protocol):
    """What a trial needs of a system of sharded tensors."""

    calls: int  # how many times a case is tried
    draws_alike: bool  # whether random numbers are those of a plain tensor, with ranks seeded alike

    @property
    def gathers(self) -> Gathers | None:
        """What was seen to be gathered, where that is watched."""

    def shard(self, tensor: torch.Tensor, dim: int) -> Any:
        """The tensor in chunks of this dim; a scalar on every rank."""

    def whole(self, value: Any) -> Any:
        """The plain tensor of a sharded one; anything else as it is."""

    def copy(self, value: Any, *, grad: bool) -> Any:
        """A sharded tensor with memory of its own and the same values; nothing travels."""

    def scope(self, arguments: list[Any]) -> contextlib.AbstractContextManager[object]:
        """Within which an op is called with these."""

    def backward(self, outputs: list[Any], weights: Weights, control: Control) -> None:
        """Send these gradients of the outputs back."""

    def gradients(self, leaves: list[Any], control: Control) -> list[torch.Tensor]:
        """The whole gradients of these sharded tensors."""


class Shardwise:
    """Sharded tensors of this library, with the gather budget given, else its default."""

    calls = 2  # the second is done as it is remembered of the first

    def __init__(self, device: str, budget: int | None) -> None:
        self._device, self._budget, self.draws_alike = device, budget, device == "cpu"
        self.gathers = Gathers() if budget == 0 else None

    def shard(self, tensor: torch.Tensor, dim: int) -> Any:
        places = [f"rank:{rank}/{self._place(rank)}" for rank in range(dist.get_world_size())]
        if tensor.ndim == 0 and tensor.dtype == torch.int64:  # a plain id would be this rank's own batch
            return shardwise.tensor.shard_tensor(tensor, shardwise.ReplicatedShardingSpec(places))
        if tensor.ndim == 0:
            return tensor
        return shardwise.tensor.shard_tensor(tensor, shardwise.ChunkShardingSpec(dim, places))

    def _place(self, rank: int) -> str:
        return f"cuda:{rank % torch.cuda.device_count()}" if self._device == "cuda" else self._device

    def whole(self, value: Any) -> Any:
        return value.full_tensor() if isinstance(value, shardwise.ShardedTensor) else value

    def copy(self, value: Any, *, grad: bool) -> Any:
        return value.detach().clone().requires_grad_(grad)

    @contextlib.contextmanager
    def scope(self, arguments: list[Any]) -> Iterator[None]:
        limit = getattr(shardwise, "gather_budget", None)
        limited = contextlib.nullcontext() if limit is None or self._budget is None else limit(self._budget)
        with limited, contextlib.nullcontext() if self.gathers is None else self.gathers.of(arguments):
            yield

    def backward(self, outputs: list[Any], weights: Weights, control: Control) -> None:
        flows = [isinstance(out, torch.Tensor) and out.requires_grad for out in outputs]
        told = control.exchange("asking for graphs", flows)
        roots, grads = [], []
        for out, weight, *flowing in zip(outputs, weights, *told, strict=True):
            if weight is None or not any(flowing):
                continue
            roots.append(out)
            sharded = isinstance(out, shardwise.ShardedTensor)
            grads.append(shardwise.tensor.shard_tensor(weight.contiguous(), out.sharding_spec()) if sharded else weight)
        if roots:
            backward(roots, grads)

    def gradients(self, leaves: list[Any], control: Control) -> list[torch.Tensor]:
        grads = [leaf.grad for leaf in leaves]
        told = control.exchange("asking for gradients", [grad is not None for grad in grads])
        wholes = []
        with torch.no_grad():
            for leaf, grad, *there in zip(leaves, grads, *told, strict=True):
                if not any(there):
                    wholes.append(torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device))
                else:
                    wholes.append((_zeros(leaf) if grad is None else grad.detach()).full_tensor())
        return wholes


def _zeros(tensor: shardwise.ShardedTensor) -> Any:
    """The gradient of a rank on which nothing depends, while others have one."""
    zeros: Any = tensor.detach().clone()
    for shard in zeros.local_shards():
        shard.tensor.zero_()
    return zeros


class DTensors:
    """Torch's own distributed tensors on a mesh of one axis."""

    calls, draws_alike = 1, False
    gathers = None

    def __init__(self, device: str) -> None:
        self._mesh = _mesh(device)

    def shard(self, tensor: torch.Tensor, dim: int) -> Any:
        placement = Shard(dim) if tensor.ndim else Replicate()
        return distribute_tensor(tensor, self._mesh, [placement])

    def whole(self, value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else value

    def copy(self, value: Any, *, grad: bool) -> Any:
        return value.detach().clone().requires_grad_(grad)

    def scope(self, arguments: list[Any]) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def backward(self, outputs: list[Any], weights: Weights, control: Control) -> None:
        pairs = [
            (self.whole(out), weight)
            for out, weight in zip(outputs, weights, strict=True)
            if weight is not None and isinstance(out, torch.Tensor) and out.requires_grad
        ]
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [weight for _, weight in pairs])

    def gradients(self, leaves: list[Any], control: Control) -> list[torch.Tensor]:
        with torch.no_grad():
            return [torch.zeros_like(self.whole(t)) if t.grad is None else self.whole(t.grad) for t in leaves]


@functools.cache
def _mesh(device: str) -> DeviceMesh:
    return init_device_mesh(device, (dist.get_world_size(),))


def system(name: str, device: str) -> System:
    """The system of this name, `dtensor`, `shardwise`, or `shardwise:BUDGET`, with shards on this kind of device."""
    kind, _, budget = name.partition(":")
    return DTensors(device) if kind == "dtensor" else Shardwise(device, int(budget) if budget else None)
