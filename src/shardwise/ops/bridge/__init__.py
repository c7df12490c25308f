"""Where torch's autograd is asked of a sharded tensor: backwards, hooks, custom Functions."""

from shardwise.ops.bridge import backward, functions, hooks

__all__ = ["backward", "functions", "hooks"]
