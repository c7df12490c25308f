"""Experts on ranks: whole experts lie anywhere, and tokens travel to them and back in exact numbers.

- `plan`: the plan `expert_parallel`; `finding`: layers of experts in a model; `placement`: the ranks of experts
- `layer`: the forward of a layer of experts; `tokens`: the tokens of this rank; `local_experts`: its experts
- `route`: to which rank a token goes; `dispatch`: the way of tokens to experts and back
"""

from shardwise.nn.experts.plan import ExpertPlan, expert_parallel

__all__ = ["ExpertPlan", "expert_parallel"]
