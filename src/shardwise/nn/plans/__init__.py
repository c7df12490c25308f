"""Plans for whole models, with a reason for each choice.

- `tensor_parallel`; `uniform`: `fully_sharded`, `rows`, `columns`; `reasons`: the plan with its reasons as a table
- `layers`: layers by their usual names, and heads; `transformers_plan`: the plan of a transformers model
- `rank_rows`: the ranks over which parameters are cut
"""

from shardwise.nn.plans.reasons import Reason, ReasonedPlan
from shardwise.nn.plans.tensor_parallel import tensor_parallel
from shardwise.nn.plans.uniform import columns, fully_sharded, rows

__all__ = ["Reason", "ReasonedPlan", "columns", "fully_sharded", "rows", "tensor_parallel"]
