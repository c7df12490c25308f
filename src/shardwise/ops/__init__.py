"""Families of ops on sharded tensors. Importing this package registers them."""

from shardwise.ops import (
    along,
    attributes,
    autograd,
    below,
    comparison,
    copies,
    creation,
    foreach,
    indexing,
    init,
    linear,
    loss,
    matmul,
    pointwise,
    reduction,
    shape,
)

__all__ = [
    "along",
    "attributes",
    "autograd",
    "below",
    "comparison",
    "copies",
    "creation",
    "foreach",
    "indexing",
    "init",
    "linear",
    "loss",
    "matmul",
    "pointwise",
    "reduction",
    "shape",
]
