"""`torch.compile` of models with sharded parameters.

- `units`: `compile`, which compiles each unit of a model in its place.
- `compiled_forward`: what takes the place of a unit's forward.
- `captured_graph`: the forward of a unit as a graph of torch's functions, run on sharded tensors.
- `stand_ins`: plain tensors in the place of sharded ones, for torch's tracer.
- `segments`: the steps of a program between transfers, compiled.
"""

from shardwise.compilation.units import compile

__all__ = ["compile"]
