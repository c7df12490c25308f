"""What users ask of torch's autograd on a sharded tensor: backwards, hooks, custom Functions.

These modules register handlers on the tensor, so they lie above `shardwise.tensor`. `shardwise.autograd` lies below it:
the Functions that tensors are moved by, and the task of a running backward.
"""

from shardwise.ops.autograd import backward, functions, hooks

__all__ = ["backward", "functions", "hooks"]
