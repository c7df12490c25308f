"""`torch.compile` of models with sharded parameters.

- `entry`: the verb `compile`
- `units`: each unit of a model, compiled in its place; `compiled_forward`: what takes the place of a unit's forward
- `captured_graph`: the forward of a unit as a graph of torch's functions, run on sharded tensors
- `stand_ins`: plain tensors in the place of sharded ones, for torch's tracer
- `segments`: the steps of a program between transfers, compiled
- `full_graph`: calls of a function, compiled as one graph of the forward and one of the backward
- `inputs`: the tensors of a call that become inputs of its graph; `guards`: what else a graph depends on
- `tracing`: a call as a function of local tensors; `boundary`: where autograd begins and ends in it
- `graph_ops`: transfers as ops of a graph
- `backends`: the backends of `torch.compile`, by name
"""

from shardwise.compilation.entry import compile, in_one_graph

__all__ = ["compile", "in_one_graph"]
