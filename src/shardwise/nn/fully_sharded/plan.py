"""`FullyShard`: the options of `fully_shard` as a plan, for `shard_module`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from shardwise.nn.fully_sharded.cuts import ELEMENTS, Align
from shardwise.nn.fully_sharded.flat_memory import Precision


@dataclass(frozen=True)
class FullyShard:
    """A plan that makes `shard_module` do what `fully_shard` does with these options.

    >>> model = shardwise.shard_module(torch.nn.Linear(4, 4), shardwise.plans.FullyShard(weights=[2, 1]))
    >>> model.weight.sharding.elements_by_rank()
    {0: 13, 1: 3}
    """

    units: str | Sequence[str] | None = None
    weights: Sequence[float] | None = None
    align: Align | Mapping[str, Align] = ELEMENTS
    precision: Precision | None = None
    prefetch: int = 1
    keep: bool = False
    offload: bool = False
    mesh: DeviceMesh | None = None

    def options(self) -> dict[str, Any]:
        """As `fully_shard` takes them."""
        return {one.name: getattr(self, one.name) for one in fields(self)}
