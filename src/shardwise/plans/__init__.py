"""Plans for whole models: tensor parallel, fully sharded, by rows, by columns; each says what it chose and why."""

from shardwise.plans.reasons import Reason, ReasonedPlan
from shardwise.plans.tensor_parallel import tensor_parallel
from shardwise.plans.uniform import columns, fully_sharded, rows

__all__ = ["Reason", "ReasonedPlan", "columns", "fully_sharded", "rows", "tensor_parallel"]
