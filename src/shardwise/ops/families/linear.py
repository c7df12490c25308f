"""`linear` with a sharded weight: a product and a sum.

A plain input is the same on every rank. Where `own_batches` holds it is this rank's own batch, and the result is over
all batches, one behind another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from shardwise import settings
from shardwise.dispatch import registry
from shardwise.errors import PropertyError
from shardwise.ops.engine.descent import descend
from shardwise.ops.engine.kind import BLIND
from shardwise.ops.engine.programs import remembered
from shardwise.partial import ReplicatedTensor
from shardwise.sharded_tensor import ShardedTensorBase, from_local


def _linear(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    return remembered(functional.linear, args, kwargs, _multiply)


def _multiply(op: Any, args: Any, kwargs: Any) -> Any:
    names = ("input", "weight", "bias")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if "input" not in given and args:  # moved to the front by name
        given["input"] = args[0]
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    if isinstance(weight, ShardedTensorBase) and weight.ndim == 2:
        if isinstance(x, ReplicatedTensor):
            x = x.as_subclass(torch.Tensor)
        elif settings.current().own_batches and not isinstance(x, ShardedTensorBase):
            x = _all_batches(x, weight)
    return descend(functional.linear, (x, weight) if bias is None else (x, weight, bias), {})


def _all_batches(batch: torch.Tensor, weight: ShardedTensorBase) -> ShardedTensorBase:
    """The batches of all ranks of the weight's group, one behind another; one sample is a batch of one."""
    if weight._process_group is None:
        raise PropertyError("a sharded weight without a process group cannot be multiplied")
    return from_local(batch if batch.ndim > 1 else batch.reshape(1, -1), process_group=weight._process_group)


registry.built_in[functional.linear] = _linear
BLIND.add(functional.linear)
