"""Conversion between sharded tensors and the tensors of other systems."""

from shardwise.interop.dtensor import from_dtensor, to_dtensor

__all__ = ["from_dtensor", "to_dtensor"]
