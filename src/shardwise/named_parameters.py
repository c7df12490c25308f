"""The parameters of a module by name, those of the old kind included: sharded tensors that are plain attributes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from shardwise.sharded_tensor import ShardedTensor


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and parameters, each tensor once under its first name: sharded attributes first, then parameters.

    ``prefix`` is put before every name, with a dot; without ``recurse``, submodules are left out. No communication.
    """
    seen: set[int] = set()
    for name, tensor in _candidates(module, prefix, recurse):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _candidates(module: nn.Module, prefix: str, recurse: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for path, owner in module.named_modules(prefix=prefix) if recurse else [(prefix, module)]:
        for name, value in vars(owner).items():
            if isinstance(value, ShardedTensor):
                yield f"{path}.{name}" if path else name, value
    yield from module.named_parameters(prefix=prefix, recurse=recurse)
