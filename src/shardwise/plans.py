"""Plans for whole models: tensor parallel, fully sharded, by rows, by columns; each says what it chose and why.

`FullyShard` has the options of `fully_shard`. `expert_parallel` puts whole experts on ranks, beside any other plan.
`context_parallel` cuts sequences. `auto` compares ways to train a model on given devices.
"""

from shardwise.estimation.planning import AutoPlan, Candidate, auto
from shardwise.nn.context_parallel import ContextParallel, context_parallel
from shardwise.nn.experts import ExpertPlan, Rebalanced, expert_parallel
from shardwise.nn.fully_sharded import FullyShard
from shardwise.nn.plans import Reason, ReasonedPlan, columns, fully_sharded, rows, tensor_parallel

__all__ = [
    "AutoPlan",
    "Candidate",
    "ContextParallel",
    "ExpertPlan",
    "FullyShard",
    "Reason",
    "ReasonedPlan",
    "Rebalanced",
    "auto",
    "columns",
    "context_parallel",
    "expert_parallel",
    "fully_sharded",
    "rows",
    "tensor_parallel",
]
