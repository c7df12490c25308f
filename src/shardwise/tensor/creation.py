"""Factories: new sharded tensors, each rank filling its own shards.

Random ones have the numbers of a plain tensor of the whole size, with ranks seeded alike, whatever the layout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack

import torch
from torch.distributed import ProcessGroup

from shardwise.tensor.random import NORMAL, UNIFORM
from shardwise.tensor.shard import Shard
from shardwise.tensor.shorthand import ShardingLike
from shardwise.tensor.tensor import ShardedTensor

P = ParamSpec("P")
R = TypeVar("R")


class FactoryOptions(TypedDict, total=False):
    """The options of every factory.

    ``dtype`` is torch's default when not given, ``process_group`` the default group. ``init_rrefs`` also makes RPC
    references to the shards of other ranks. Only strided, contiguous tensors are supported.
    """

    dtype: torch.dtype | None
    layout: torch.layout
    requires_grad: bool
    pin_memory: bool
    memory_format: torch.memory_format
    process_group: ProcessGroup | None
    init_rrefs: bool


class RandomOptions(FactoryOptions, total=False):
    """The options of random factories."""

    generator: torch.Generator | None


def _shows_options(factory: Callable[P, R]) -> Callable[P, R]:
    """Show every option, with its default, in the factory's signature."""
    given = inspect.signature(factory)
    options = [
        parameter
        for parameter in inspect.signature(ShardedTensor.__new__).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    own = [p for p in given.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    factory.__signature__ = given.replace(parameters=[*own, *options])  # type: ignore[attr-defined] # mypy#12472
    return factory


@_shows_options
def empty(sharding_spec: ShardingLike, *size: Any, **options: Unpack[FactoryOptions]) -> ShardedTensor:
    """A tensor with uninitialised shards. Every rank of the group calls it; only a digest travels.

    The sharding is said as in `shardwise.shard`: a spec, a dim that is cut over all ranks, or None for a replica on
    each. The shards are where the spec says, else on the accelerator if the group's backend moves it. ``dtype`` is
    torch's default when not given, ``process_group`` the default group. Raises `SpecError` if the spec cannot cut this
    size, `RankMismatchError` on every rank if they do not ask for the same::

        >>> shardwise.empty(0, 5, 4).local_tensor().shape[1]
        4
    """
    return ShardedTensor(sharding_spec, *size, **options)


@_shows_options
def zeros(sharding_spec: ShardingLike, *size: Any, **options: Unpack[FactoryOptions]) -> ShardedTensor:
    """A tensor of zeros. Every rank of the group calls it; only a digest travels. Arguments are those of `empty`.

    >>> shardwise.zeros(0, (5, 4), dtype=torch.int64).sum().item()
    0
    """
    return ShardedTensor._filled("zeros", sharding_spec, size, fill=torch.Tensor.zero_, **options)


@_shows_options
def ones(sharding_spec: ShardingLike, *size: Any, **options: Unpack[FactoryOptions]) -> ShardedTensor:
    """A tensor of ones. Every rank of the group calls it; only a digest travels. Arguments are those of `empty`.

    >>> shardwise.ones(None, 5).sum().item()  # replicas are one value
    5.0
    """
    return ShardedTensor._filled("ones", sharding_spec, size, fill=lambda shard: shard.fill_(1), **options)


@_shows_options
def full(
    sharding_spec: ShardingLike, size: Sequence[int], fill_value: Any, **options: Unpack[FactoryOptions]
) -> ShardedTensor:
    """A tensor of one value, of torch's default dtype unless told otherwise. Every rank calls it; a digest travels.

    The other arguments are those of `empty`::

        >>> shardwise.full(0, (2, 2), 7).full_tensor()
        tensor([[7., 7.],
                [7., 7.]])
    """
    verb = f"full of {fill_value}"
    return ShardedTensor._filled(verb, sharding_spec, (size,), fill=lambda shard: shard.fill_(fill_value), **options)


@_shows_options
def rand(sharding_spec: ShardingLike, *size: Any, **options: Unpack[RandomOptions]) -> ShardedTensor:
    """A tensor drawn uniformly from [0, 1): the numbers of ``torch.rand``, with ranks seeded alike.

    Every rank calls it. The numbers come from torch's generator of the device, or from ``generator``, which every rank
    gives in the same state, and do not depend on the sharding. The other arguments are those of `empty`::

        >>> _ = torch.manual_seed(0)
        >>> x = shardwise.rand(0, 100, 4)
        >>> _ = torch.manual_seed(0)
        >>> torch.equal(x.full_tensor(), torch.rand(100, 4))
        True
    """
    return ShardedTensor._filled("rand", sharding_spec, size, draw=UNIFORM, **options)


@_shows_options
def randn(sharding_spec: ShardingLike, *size: Any, **options: Unpack[RandomOptions]) -> ShardedTensor:
    """A tensor drawn from the standard normal distribution: with ranks seeded alike, the numbers of ``torch.randn``.

    Every rank calls it. Arguments are those of `rand`::

        >>> shardwise.randn(1, 100, 4).shape
        torch.Size([100, 4])
    """
    return ShardedTensor._filled("randn", sharding_spec, size, draw=NORMAL, **options)


def init_from_local_shards(
    local_shards: list[Shard],
    *global_size: Any,
    process_group: ProcessGroup | None = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """A tensor from every rank's own shards. Every rank of the group calls it; the shards' metadata travels.

    A ``None`` in the global size means: work it out. A rank may bring an empty list::

        local = Shard.from_tensor_and_offsets(torch.ones(2, 4), shard_offsets=[2 * rank, 0], rank=rank)
        tensor = init_from_local_shards([local], None, 4)
    """
    return ShardedTensor._init_from_local_shards(
        local_shards, *global_size, process_group=process_group, init_rrefs=init_rrefs
    )
