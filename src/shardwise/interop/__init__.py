"""Other systems' tensors and checkpoints."""

from shardwise.interop import collectives, compiling, dcp_optimizers, ddp, fsdp1, fsdp2, lightning, wrapping
from shardwise.interop.dtensor import from_dtensor, to_dtensor

__all__ = [
    "collectives",
    "compiling",
    "dcp_optimizers",
    "ddp",
    "from_dtensor",
    "fsdp1",
    "fsdp2",
    "lightning",
    "to_dtensor",
    "wrapping",
]
