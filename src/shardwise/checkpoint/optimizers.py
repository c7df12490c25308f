"""Room for the state of an optimizer, which has none before its first step."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.checkpoint.index import StoredTensor
from shardwise.checkpoint.nest import Kind, Node
from shardwise.sharded_tensor import ShardedTensorBase


def content_to_fill(owner: Any, stored: Node | None) -> Any:
    """The state dict of an object; with tensors to load into where it is an optimizer that has not made them yet.

    What torch's optimizers keep for a parameter is of its size, and then lies as it does, or else is plain.
    """
    content = owner.state_dict()
    if not isinstance(owner, torch.optim.Optimizer) or stored is None or "state" not in stored.children:
        return content
    groups = zip(owner.param_groups, content["param_groups"], strict=True)
    pairs = [pair for group, packed in groups for pair in zip(packed["params"], group["params"], strict=True)]
    parameters = dict(pairs)
    entries = dict(content["state"])
    for number, entry in stored.children["state"].children.items():
        if number in parameters and number not in entries:
            entries[number] = _blank(parameters[number], entry)
    return {**content, "state": entries}


@torch.no_grad()
def _blank(parameter: torch.Tensor, stored: Node) -> Any:
    if stored.kind is Kind.TENSOR:
        return _blank_tensor(parameter, stored.own)
    inner = {key: _blank(parameter, child) for key, child in stored.children.items()}
    if stored.kind is Kind.DICT:
        return inner
    return stored.own if stored.kind is Kind.VALUE else type(stored.own)(inner.values())


def _blank_tensor(parameter: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    if parameter.shape != stored.size:
        return torch.zeros(stored.size, dtype=stored.dtype)
    if isinstance(parameter, ShardedTensorBase):
        tensors = [torch.zeros_like(local, dtype=stored.dtype) for local in parameter._local_tensors()]
        made: torch.Tensor = parameter._like(tensors, stored.dtype)
        return made
    return torch.zeros_like(parameter, dtype=stored.dtype)
