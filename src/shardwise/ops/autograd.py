"""Backward from a sharded tensor: from its shards, and from the anchor of a rank that has none."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.dispatch import registry
from shardwise.errors import PropertyError
from shardwise.sharded_tensor import ShardedTensorBase


def _backward(types: Any, args: Any, kwargs: Any, process_group: Any) -> None:
    tensor = args[0]
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    given = {**dict(zip(names, args[1:], strict=False)), **kwargs}
    gradient = given.pop("gradient", None)
    if gradient is None:
        if tensor.numel() != 1:
            raise PropertyError("grad can be implicitly created only for scalar outputs: give backward a gradient")
        grads = [torch.ones_like(local) for local in tensor._local_tensors()]
    else:
        grads = tensor._locals_of(gradient)
    roots = list(tensor._local_tensors())
    if not roots and tensor._anchor is not None:
        roots, grads = [tensor._anchor], [torch.zeros_like(tensor._anchor)]
    if given.get("inputs") is not None:
        inputs = given["inputs"] if isinstance(given["inputs"], list | tuple) else [given["inputs"]]
        given["inputs"] = [
            local for one in inputs for local in (one._local_tensors() if isinstance(one, ShardedTensorBase) else [one])
        ]
    if roots:
        torch.autograd.backward(roots, grads, **given)


registry.built_in[torch.Tensor.backward] = _backward
