"""Plans for whole models: tensor parallel, fully sharded, by rows, by columns; each says what it chose and why."""

from shardwise.nn.plans import Reason, ReasonedPlan, columns, fully_sharded, rows, tensor_parallel

__all__ = ["Reason", "ReasonedPlan", "columns", "fully_sharded", "rows", "tensor_parallel"]
