"""Real ranks for tests, examples and experiments on one machine: processes that are started once and reused.

`decorator` has ``ranks`` for tests, `pool` the processes, `worker` what runs in them, `task` what is sent to them.
"""

from shardwise.testing.decorator import ranks
from shardwise.testing.pool import Pool, RankFailure, run_on_ranks

__all__ = ["Pool", "RankFailure", "ranks", "run_on_ranks"]
