"""`linear` with a sharded weight. A plain input is this rank's own batch; the result is over all batches, one behind
another."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

from shardwise.dispatch import registry
from shardwise.errors import PropertyError
from shardwise.geometry import Boxes
from shardwise.layout import Layout
from shardwise.ops.below import descend
from shardwise.ops.compute import assemble, frame_of, places_of
from shardwise.ops.replay import remembered
from shardwise.partial import ReplicatedTensor
from shardwise.process_group import Fields, group_ranks, in_step_sharing
from shardwise.sharded_tensor import ShardedTensorBase


def _linear(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    return remembered(functional.linear, args, kwargs, _multiply)


def _multiply(op: Any, args: Any, kwargs: Any) -> Any:
    names = ("input", "weight", "bias")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if "input" not in given and args:  # moved to the front by name
        given["input"] = args[0]
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    if isinstance(weight, ShardedTensorBase) and weight.ndim == 2 and not isinstance(x, ShardedTensorBase):
        x = x.as_subclass(torch.Tensor) if isinstance(x, ReplicatedTensor) else joined_batches(x, weight)
    if not isinstance(weight, ShardedTensorBase) or weight.ndim != 2:
        return descend(functional.linear, (x, weight) if bias is None else (x, weight, bias), {})
    made = torch.matmul(x, weight.t())
    return made if bias is None else made + bias


def joined_batches(batch: torch.Tensor, model: ShardedTensorBase) -> ShardedTensorBase:
    """The batches of all ranks, one behind another, as one tensor whose shards they are.

    Every rank of the group calls it, with batches that differ at most in their first dim; the sizes travel.
    """
    group = model._process_group
    batch = batch if batch.ndim > 1 else batch.reshape(1, -1)

    def work() -> tuple[None, Fields, int]:
        fields = {"verb": "batches", "sample": tuple(batch.shape[1:]), "dtype": batch.dtype}
        return None, {**fields, "requires_grad": torch.is_grad_enabled() and batch.requires_grad}, batch.shape[0]

    if group is None:
        raise PropertyError("a sharded weight without a process group cannot be multiplied")
    _, counts = in_step_sharing(group, work)
    places = places_of(model._layout, group)
    begins = np.array([0, *itertools.accumulate(counts)], dtype=np.int64)
    size = torch.Size([int(begins[-1]), *batch.shape[1:]])
    sizes = np.tile(np.array(size, dtype=np.int64), (len(counts), 1))
    sizes[:, 0] = counts
    offsets = np.zeros_like(sizes)
    offsets[:, 0] = begins[:-1]
    assert group_ranks(group)[dist.get_rank(group)] == dist.get_rank()
    frame = frame_of(Layout.of(size, Boxes(offsets, sizes), places), batch.dtype, group)
    return assemble(type(model), frame, [batch], [], batch.requires_grad)


registry.built_in[functional.linear] = _linear
