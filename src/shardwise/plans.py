"""Plans for whole models: tensor parallel, fully sharded, by rows, by columns; each says what it chose and why.

`FullyShard` has the options of `fully_shard`.
"""

from shardwise.nn.fully_sharded import FullyShard
from shardwise.nn.plans import Reason, ReasonedPlan, columns, fully_sharded, rows, tensor_parallel

__all__ = ["FullyShard", "Reason", "ReasonedPlan", "columns", "fully_sharded", "rows", "tensor_parallel"]
