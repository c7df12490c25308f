"""Ops on sharded tensors: small ones on one rank, and embedding on four. Layers are in `layers.py`.

Everybody starts from the same values and does the same work. Before the clock runs, everybody's results are compared
with those of plain tensors.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 # as everybody calls it
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise
from benchmarks.table import Row
from benchmarks.timing import Work, best_of, best_together
from benchmarks.transfers import places

Held = tuple[str, tuple[str, float] | None]

HALF_OF_DTENSOR: Held = ("≤ 1/2 DTensor", ("DTensor", 0.5))
HALF_OF_UPSTREAM: Held = ("≤ 1/2 _shard", ("_shard", 0.5))
NO_BUDGET: Held = ("", None)

WORDS, WIDTH, IDS = 200_000, 64, 8_192  # of an embedding, and of a rank's batch
WARM_UP = 3  # calls; the results of the last are compared, so that of training more than the first step is seen
TOGETHER = functools.partial(best_together, repeats=15)


def race(
    work: str,
    contenders: Mapping[str, Work],
    reference: Work,
    *,
    held: Held = NO_BUDGET,
    timed: Callable[[Mapping[str, Work]], dict[str, float]] = TOGETHER,
) -> Row:
    """Time those who can do the work. Who raises, does so on every rank; and the row tells."""
    expected = [reference() for _ in range(WARM_UP)][-1]
    able, raised = dict(contenders), {}
    for name, run in contenders.items():
        try:
            results = [run() for _ in range(WARM_UP)]
        except Exception as error:
            raised[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
            del able[name]
        else:
            require_same(f"{work}, by {name}", results[-1], expected)
    seconds = {**timed(able), **dict.fromkeys(raised, float("inf"))}
    return Row(work, seconds, *held, raised)


def require_same(what: str, result: Any, expected: Any) -> None:
    """Raise unless what is here of the result is what was computed from plain tensors."""
    if isinstance(expected, tuple):
        for one, other in zip(result, expected, strict=True):
            require_same(what, one, other)
        return
    if isinstance(result, shardwise.ShardedTensor):
        result = result.local_tensor() if result.ndim else result.full_tensor()
    if isinstance(result, DTensor):
        result = result.to_local() if result.ndim else result.full_tensor()
    torch.testing.assert_close(result.detach(), expected.detach(), rtol=1e-3, atol=1e-4, msg=lambda m: f"{what}: {m}")


def our_specs() -> tuple[shardwise.ShardingSpec, shardwise.ShardingSpec, shardwise.ShardingSpec]:
    """Over all ranks: cut on dim 0, cut on dim 1, and whole on each."""
    where = places(dist.get_world_size())
    chunk = shardwise.ChunkShardingSpec
    return chunk(0, where), chunk(1, where), shardwise.ReplicatedShardingSpec(where)


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


# Small ops on one rank ------------------------------------------------------------------------------------------------


def small_ops() -> list[Row]:
    """Runs on one rank: no communication, one local shard of 64x64."""
    warnings.simplefilter("ignore")
    cut, _, whole = our_specs()
    mesh, plain, zeros = mesh_of_all(), torch.rand(64, 64), torch.zeros(64, 64)
    tensors: dict[str, tuple[Any, ...]] = {  # sharded, sharded and to be changed in place, replicated
        "shardwise": tuple(
            shardwise.tensor.shard_tensor(*pair) for pair in ((plain, cut), (zeros, cut), (plain, whole))
        ),
        "plain": (plain, zeros.clone(), plain),
        "DTensor": tuple(
            distribute_tensor(tensor, mesh, [place])
            for tensor, place in ((plain, Shard(0)), (zeros.clone(), Shard(0)), (plain, Replicate()))
        ),
    }
    ops: list[tuple[str, Callable[[Any, Any, Any], Any], Held]] = [
        ("add", lambda x, total, w: x + x, HALF_OF_DTENSOR),
        ("mul by a number", lambda x, total, w: x * 2.0, HALF_OF_DTENSOR),
        ("add_", lambda x, total, w: total.add_(x), HALF_OF_DTENSOR),
        ("relu", lambda x, total, w: torch.relu(x), HALF_OF_DTENSOR),
        ("sum", lambda x, total, w: x.sum(), NO_BUDGET),
        ("matmul with a replicated one", lambda x, total, w: x @ w, NO_BUDGET),
    ]
    timed = functools.partial(best_of, calls=1_000)
    rows = []
    for name, op, held in ops:
        contenders = {who: functools.partial(op, *three) for who, three in tensors.items()}
        reference = functools.partial(op, plain, zeros.clone(), plain)
        rows.append(race(f"{name}, 64x64", contenders, reference, held=held, timed=timed))
    return rows


# Embedding ------------------------------------------------------------------------------------------------------------


def embedding() -> list[Row]:
    """Each rank looks its own ids up in a table of which it holds a part, and hands back a gradient for what it got."""
    warnings.simplefilter("ignore")
    world, rank = dist.get_world_size(), dist.get_rank()
    table, ids, grads = torch.rand(WORDS, WIDTH), torch.randint(WORDS, (world, IDS)), torch.rand(world, IDS, WIDTH)
    plain = table.clone().requires_grad_()
    out = F.embedding(ids, plain)
    out.backward(grads)
    rows = []
    for kind, dim, held in (("row-wise", 0, HALF_OF_UPSTREAM), ("column-wise", 1, NO_BUDGET)):
        expected = out[rank], grad_of(plain).chunk(world, dim)[rank]
        contenders = {
            name: functools.partial(embedding_step, *make(table, dim), ids[rank], grads[rank])
            for name, make in (
                ("shardwise", our_table),
                ("own batches", our_table_of_own_batches),
                ("DTensor", dtensor_table),
                ("_shard", old_table),
            )
        }
        what = f"{kind} embedding, {WORDS // 1000}k x {WIDTH}, {IDS:,} ids a rank, {world} ranks, fwd + bwd"
        rows.append(race(what, contenders, lambda expected=expected: expected, held=held))  # type: ignore[misc] # bound now
    return rows


def embedding_step(
    weight: Tensor, lookup: Callable[[Tensor], Tensor], ids: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Forward and backward, as after `zero_grad`, to a gradient that lies as the weight does."""
    weight.grad = None
    out = lookup(ids)
    out.backward(grad)
    found: Any = grad_of(weight)
    if isinstance(weight, DTensor):  # of a row-wise weight it has all of the gradient on every rank
        found = found.redistribute(placements=weight.placements)
    return out, found


def grad_of(tensor: Tensor) -> Tensor:
    grad = tensor.grad
    assert grad is not None, "backward left no gradient"
    return grad


def our_table(table: Tensor, dim: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The ids of all ranks, of which each has as many, as one batch; each rank takes its own rows back."""
    weight, sizes = (
        shardwise.tensor.shard_tensor(table, our_specs()[dim]).requires_grad_(),
        [IDS] * dist.get_world_size(),
    )
    return weight, lambda ids: F.embedding(shardwise.from_local(ids, sizes=sizes), weight).local_tensor()  # type: ignore[attr-defined] # sharded


def our_table_of_own_batches(table: Tensor, dim: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    weight = shardwise.tensor.shard_tensor(table, our_specs()[dim]).requires_grad_()

    def lookup(ids: Tensor) -> Tensor:
        with shardwise.settings.own_batches():
            return F.embedding(ids, weight)

    return weight, lookup


def dtensor_table(table: Tensor, dim: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    module = nn.Embedding(WORDS, WIDTH, _weight=table.clone())
    style = (RowwiseParallel, ColwiseParallel)[dim](input_layouts=Shard(0), output_layouts=Shard(0))
    parallelize_module(module, mesh_of_all(), style)
    return module.weight, module


def old_table(table: Tensor, dim: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    from torch.distributed._shard.api import shard_parameter
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    module = nn.Embedding(WORDS, WIDTH, _weight=table.clone())
    shard_parameter(module, "weight", ChunkShardingSpec(dim, list(places(dist.get_world_size()))))
    sharded: Any = module.weight
    return sharded.local_tensor(), module
