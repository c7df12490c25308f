"""Other systems' tensors and checkpoints."""

from shardwise.interop import compiling, fsdp2
from shardwise.interop.dtensor import from_dtensor, to_dtensor

__all__ = ["compiling", "from_dtensor", "fsdp2", "to_dtensor"]
