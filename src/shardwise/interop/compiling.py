"""`torch.compile` compiles what is around sharded tensors, and leaves them to run as they do without it.

What happens to a sharded tensor depends on layouts and on other ranks, and the graph is in its shards: nothing that
torch's tracer could follow. So it is told not to look into this package. Where a function or a method is called on a
sharded tensor, it ends one graph and begins another. It cannot do so at an operator such as ``*``: a function that has
one on a sharded tensor runs as it is, and what that calls is compiled on its own.
"""

from __future__ import annotations

from shardwise.interop.loading import when_loaded

RULES = "torch._dynamo.trace_rules"  # which functions are traced; torch offers no way to name one that is not loaded
PACKAGE = "shardwise"

when_loaded(RULES, lambda rules: rules.add(PACKAGE))
