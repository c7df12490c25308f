"""`Sharder`: a way to shard a whole submodule that no spec of its parameters describes."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn


class Sharder(ABC):
    """Makes a sharded module in the place of a submodule. A `ShardingPlan` names it by the submodule's path.

    It is given the submodule and answers with the module that `shard_module` puts in its place, everywhere the
    submodule is used: the same object, changed, or another::

        class SplitHeads(Sharder):
            def shard(self, module: nn.Module) -> nn.Module:
                return ShardedAttention(module, spec)
    """

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """The sharded module. Every rank calls it, in the same order, so it may use collectives."""
