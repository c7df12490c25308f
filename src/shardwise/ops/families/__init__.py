"""Families of ops: each file says how the ops of one kind are computed on shards.

- under rules: ``matmul`` (with linear), ``convolution``, ``attention``, ``normalisation``, ``loss``, ``pointwise``,
  ``reduction``, ``whole_dims`` (softmax, sort, fft, pooling, linear algebra), ``indexing``, ``shape`` (views)
- on boxes: ``slicing``, ``cat``
- by other ops or step by step: ``recurrent``, ``comparison``, ``foreach``, ``amp``
- with sizes that depend on values: ``selection`` (masks, nonzero, counts)
- random numbers: ``dropout``, ``sampling``, ``filling`` (in place, `torch.nn.init`), ``creation`` (`rand_like`, ...)
- without computing: ``attributes``, ``copies``, ``memory``
"""

from shardwise.ops.families import (
    amp,
    attention,
    attributes,
    cat,
    comparison,
    composed,
    convolution,
    copies,
    creation,
    distances,
    distinct,
    dropout,
    filling,
    foreach,
    indexing,
    loss,
    matmul,
    memory,
    normalisation,
    order_statistics,
    pointwise,
    recurrent,
    reduction,
    routed_indexing,
    sampling,
    scans,
    selection,
    shape,
    slicing,
    sorting,
    whole_dims,
)

__all__ = [
    "amp",
    "attention",
    "attributes",
    "cat",
    "comparison",
    "composed",
    "convolution",
    "copies",
    "creation",
    "distances",
    "distinct",
    "dropout",
    "filling",
    "foreach",
    "indexing",
    "loss",
    "matmul",
    "memory",
    "normalisation",
    "order_statistics",
    "pointwise",
    "recurrent",
    "reduction",
    "routed_indexing",
    "sampling",
    "scans",
    "selection",
    "shape",
    "slicing",
    "sorting",
    "whole_dims",
]
