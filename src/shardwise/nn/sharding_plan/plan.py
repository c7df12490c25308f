"""`ShardingPlan`: specs and sharders by name; `Sharder`: replaces a submodule; `ShardingPlanner`: makes a plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from shardwise.layout.specs import ShardingSpec


class Sharder(ABC):
    """Makes a sharded module in the place of a submodule. A `ShardingPlan` has sharders by the submodules' paths.

    `shard_module` puts the module that it returns, the same object or another, everywhere the submodule is used::

        class SplitHeads(Sharder):
            def shard(self, module: nn.Module) -> nn.Module:
                return ShardedAttention(module, spec)
    """

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """The sharded module. Every rank calls it, in the same order, so it may use collectives."""


@dataclass
class ShardingPlan:
    """How to shard a module: specs for parameters, sharders for submodules, and what becomes of outputs.

    ``plan`` has the spec of each parameter that is to be sharded, by its name in the module, and the `Sharder` of each
    submodule that is to be swapped, by its path. A number in the place of a spec is a dim that is cut over all ranks of
    the group, and None a replica on each. ``output_plan`` has the same by the path of a module, "" for the module
    itself: its sharded output is redistributed. Outputs of modules in ``return_local_tensor`` become this rank's plain
    local tensor, after that::

        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
        >>> plan = shardwise.ShardingPlan(plan={"0.*": 0, "1.weight": 1}, output_plan={"1": 0})
        >>> shardwise.shard_module(model, plan)(torch.ones(2, 4)).sharding.boxes.sizes.tolist()
        [[1, 4], [1, 4]]

    A name may be a pattern: ``*``, ``?`` and ``[...]`` stand for characters between two dots, ``**`` for any number of
    parts, none included; a pattern never means the module itself. Where a full name and a pattern mean the same thing,
    the full name's entry holds, and patterns for parameters and outputs do not reach into a submodule that has a
    `Sharder`. Two patterns that say different things of one are an error, and so is one that matches nothing.

    A parameter that the module uses in several places (tied) is one parameter: any of its names stands for all of them.
    """

    plan: Mapping[str, ShardingSpec | Sharder | int | None]
    output_plan: Mapping[str, ShardingSpec | int | None] | None = None
    return_local_tensor: list[str] | None = None


class ShardingPlanner(ABC):
    """Makes a plan for a module; `shard_module` takes one in the place of a plan."""

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """The plan for this module. It must be the same on every rank."""
