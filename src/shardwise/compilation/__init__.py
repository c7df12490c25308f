"""`torch.compile` of models and functions of sharded tensors.

- `entry`: `compile`, `local_graph`, and what `torch.compile(fullgraph=True)` calls; it imports the rest when needed
- `units`: each unit of a model, compiled in its place; transfers stay between the compiled graphs
- `full_graph`: a model or function as one graph of local tensors on each rank, with transfers in it
- `second_derivatives`: the error where a compiled graph is differentiated twice
- `input_places`: where a full graph's inputs are looked for, in words
- `compiled_threads`: who runs what torch compiled with ``fullgraph=True``
"""

from shardwise.compilation.entry import compile, in_one_graph, local_graph

__all__ = ["compile", "in_one_graph", "local_graph"]
