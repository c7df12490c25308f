"""Context parallel training: each rank has pieces of every sequence, and whole layers.

- `plan`: `context_parallel`, the plan, and what it does to a model
- `batches`: cutting a batch; `pieces`: where sequences are cut; `token_labels`: what tokens have of their neighbours
"""

from shardwise.nn.context_parallel.plan import ContextParallel, context_parallel

__all__ = ["ContextParallel", "context_parallel"]
