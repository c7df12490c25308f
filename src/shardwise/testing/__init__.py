"""Real ranks for tests, examples and experiments on one machine: processes that are started once."""

from shardwise.testing.decorator import ranks
from shardwise.testing.pool import Pool, RankFailure, run_on_ranks

__all__ = ["Pool", "RankFailure", "ranks", "run_on_ranks"]
