"""Units of a model, compiled in their places.

- `unit_compiler`: `compile_units`, which compiles each unit of a model
- `compiled_forward`: what takes the place of a unit's forward
- `own_code`: copies of functions, so that the compiled versions of a model are its own
- `backwards`: what backwards have shown: whether second derivatives are wanted
- `captured_graph`: the forward of a unit as a graph of torch's functions, run on sharded tensors
- `placeholders`: plain tensors in the place of sharded ones, for torch's tracer
- `segments`: the steps of a program between transfers, compiled
"""

from shardwise.compilation.units.unit_compiler import compile_units

__all__ = ["compile_units"]
