"""Functions and modules of sharded tensors, compiled as one graph of local tensors on each rank.

- `graph_cache`: `FullGraph`, a function whose calls run as one graph of the forward and one of the backward
- `inputs`: the tensors of a call that become inputs of its graph; `input_forms`: what a graph depends on of each
- `guards`: what else a graph depends on; `used_values`: the modules and values that a function uses;
  `compared_values`: how values are compared from call to call
- `variants`: the graphs of one kind of call, for other strides and shared memory; `differences`: what calls differ in
- `ended_groups`: graphs end with their process groups; `sharded_modules`: whether a call has sharded tensors at all
- `tracing`: a call as a function of local tensors; `boundary`: where autograd begins and ends in it
- `local_graph`: the forward of a call as a graph that can be looked at, and exported
- `tracing_together`: errors of the tracer, and what ranks compare
- `graph_ops`: transfers as ops of a graph
- `backends`: the backends of `torch.compile`, by name
- `dynamic_sizes`: compiled code that serves many sizes; `graph_outline`: what graphs of several sizes have in common;
  `sized_graph`: a graph that takes sizes as inputs
"""

from shardwise.compilation.full_graph.graph_cache import FullGraph

__all__ = ["FullGraph"]
