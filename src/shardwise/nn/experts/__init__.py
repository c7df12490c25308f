"""Experts on ranks: whole experts lie anywhere, and tokens travel to them and back in exact numbers.

- `plan`: the plan `expert_parallel`; `finding`: layers of experts in a model; `placement`: the ranks of experts
- `layer`: the forward of a layer of experts; `tokens`: the tokens of this rank; `local_experts`: its experts
- `block`: the forward of a module with a list of experts; `block_samples`: its samples here; `block_check`: whether
  it treats samples one by one; `expert_calls`: what it asks of experts; `listed_experts`: the modules of the list
- `rebalance`: other ranks for experts between steps; `balance`: which
- `route`: to which rank a token goes; `dispatch`: the way of tokens to experts and back; `token_exchange`: the same
  under autograd; `entries`: rows that are read by several, and added up again
"""

from shardwise.nn.experts.plan import ExpertPlan, expert_parallel
from shardwise.nn.experts.rebalance import Rebalanced, rebalance

__all__ = ["ExpertPlan", "Rebalanced", "expert_parallel", "rebalance"]
