"""Gradients of sharded tensors: the graph lies on the local shards.

- `anchors`: what stands in the graph of a rank for tensors that the rank does not have
- `transfers`: autograd Functions that move shards
- `rows`: an autograd Function that sends rows where values decide
- `replicas`: autograd Functions that add up the gradients of replicas and of plain operands
- `recorded_backward`: backwards that can be differentiated again
- `task`: one object for each running backward, and what happens at its end, in which order
- `buckets`, `hook_queue`: what a task holds: gradients to be summed over ranks, and hooks to be called

What users ask of torch's autograd (`backward`, hooks, custom Functions) comes in at `shardwise.ops.autograd`.
"""
