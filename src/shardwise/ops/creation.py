"""New tensors like a given one: every rank fills shards of the same sizes, from its own generator if random."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.dispatch import Op, registry, unsupported
from shardwise.random import Draw, current_generator

LIKE = (
    torch.empty_like,
    torch.zeros_like,
    torch.ones_like,
    torch.full_like,
    torch.rand_like,
    torch.randn_like,
    torch.randint_like,
)

# How the random ones draw where a tile generator is in use.
DRAWS: dict[Op, Draw] = {
    torch.rand_like: lambda tile, generator: tile.uniform_(generator=generator),
    torch.randn_like: lambda tile, generator: tile.normal_(generator=generator),
}
FORMATS = (None, torch.preserve_format, torch.contiguous_format)


def _register(op: Op) -> None:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        tensor, *rest = args
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != tensor.device.type:
            raise unsupported(op, args, kwargs, f"the shards would leave {tensor.device.type}, where they are placed")
        if kwargs.get("layout") not in (None, torch.strided) or kwargs.get("memory_format") not in FORMATS:
            raise unsupported(op, args, kwargs, "sharded tensors are strided and contiguous")
        options = {name: value for name, value in kwargs.items() if name != "device"}
        generator, draw = current_generator(), DRAWS.get(op)
        if generator is not None and draw is not None:
            tensors = [torch.empty_like(local, **options) for local in tensor._local_tensors()]
            generator.fill(tensor._layout, tensor._frame.rows, tensors, draw)
        else:
            tensors = [op(local, *rest, **options) for local in tensor._local_tensors()]
        new = tensor._like(tensors, kwargs.get("dtype") or tensor.dtype)
        new._wants_grad = bool(kwargs.get("requires_grad", False))
        return new

    registry.built_in[op] = handler


for _op in LIKE:
    _register(_op)
