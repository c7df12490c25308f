"""In-place filling, random or not, and `torch.nn.init` on top of it.

By default each rank fills its shards from its own generator, as if it had called the same function on a plain tensor of
the shard's size. With a tile generator, the values are those of the whole tensor, whatever its sharding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from shardwise.dispatch import Op, registry
from shardwise.ops.engine.descent import descend
from shardwise.random import TileGenerator, current_generator
from shardwise.sharded_tensor import ShardedTensorBase
from shardwise.sharded_tensor.drawing import drawn_apart, drawn_here
from shardwise.sharded_tensor.moved_once import count_write
from shardwise.sharded_tensor.replicas import make_alike

RANDOM = (
    torch.Tensor.uniform_,
    torch.Tensor.normal_,
    torch.Tensor.exponential_,
    torch.Tensor.log_normal_,
    torch.Tensor.cauchy_,
    torch.Tensor.geometric_,
    torch.Tensor.random_,
    torch.Tensor.bernoulli_,
)
CONSTANT = (torch.Tensor.fill_, torch.Tensor.zero_)


def _drawn_here(tensor: ShardedTensorBase) -> AbstractContextManager[None]:
    return drawn_here(tensor.device)


def _drawn_apart(tensor: ShardedTensorBase) -> AbstractContextManager[None]:
    return drawn_apart(tensor.device, dist.get_rank() if dist.is_initialized() else 0)


def _fill_randomly(op: Op, drawing: Callable[[ShardedTensorBase], AbstractContextManager[None]]) -> None:
    """Each shard from its rank's generator, or all from one tile generator."""

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        tensor, *rest = args
        if not isinstance(tensor, ShardedTensorBase) or any(isinstance(one, torch.Tensor) for one in rest):
            return descend(op, args, kwargs)
        tensor._require_writable()
        options = {name: value for name, value in kwargs.items() if name != "generator"}
        generator = kwargs.get("generator") or current_generator()
        if isinstance(generator, TileGenerator):
            generator.fill(
                tensor._layout,
                tensor._frame.rows,
                tensor._local_tensors(),
                lambda tile, g: op(tile, *rest, **options, generator=g),
            )
        else:
            with nullcontext() if kwargs.get("generator") is not None else drawing(tensor):
                for local in tensor._local_tensors():
                    op(local, *rest, **kwargs)
            make_alike(tensor._layout, tensor._local_tensors(), tensor.dtype, tensor._frame.process_group)
        return tensor

    registry.built_in[op] = handler


def _fill_alike(op: Op) -> None:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        given = [*args[1:], *kwargs.values()]
        if not isinstance(args[0], ShardedTensorBase) or any(isinstance(one, torch.Tensor) for one in given):
            return descend(op, args, kwargs)
        args[0]._require_writable()
        for local in args[0]._local_tensors():
            op(local, *args[1:], **kwargs)
        return args[0]

    registry.built_in[op] = handler


def _initialise(function: Op, whole: Op) -> None:
    """A function of `torch.nn.init` that dispatches: on each shard as if it were all, or by tiles of the whole."""

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        # Only what is dispatched arrives by name; what torch runs as it is calls the ops above.
        tensor = args[0] if args else kwargs["tensor"]
        options = {name: value for name, value in kwargs.items() if name != "tensor"}
        generator = options.get("generator") or current_generator()
        count_write(tensor)
        if isinstance(generator, TileGenerator):
            with torch.no_grad():
                whole(tensor, *args[1:], **{**options, "generator": generator})
        else:
            given = options.get("generator") is not None or function is torch.nn.init.constant_
            with nullcontext() if given else drawn_here(tensor.device):
                for local in tensor._local_tensors():
                    if local.numel():  # of others torch warns
                        function(local, *args[1:], **options)
            make_alike(tensor._layout, tensor._local_tensors(), tensor.dtype, tensor._frame.process_group)
        return tensor

    registry.built_in[function] = handler


def _kaiming(
    tensor: Any,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: TileGenerator | None = None,
) -> None:
    if 0 in tensor.shape:
        return
    fan = torch.nn.init._calculate_correct_fan(tensor, mode)  # type: ignore[arg-type] # torch checks the mode
    gain = torch.nn.init.calculate_gain(nonlinearity, a)  # type: ignore[arg-type] # torch checks the name
    bound = math.sqrt(3.0) * gain / math.sqrt(fan)
    tensor.uniform_(-bound, bound, generator=generator)


for _op in RANDOM:  # those of `torch.nn.init` as each rank would fill a plain tensor; others differ between ranks
    _fill_randomly(_op, _drawn_here if _op in (torch.Tensor.uniform_, torch.Tensor.normal_) else _drawn_apart)
for _constant in CONSTANT:
    _fill_alike(_constant)
_initialise(torch.nn.init.uniform_, lambda t, a=0.0, b=1.0, generator=None: t.uniform_(a, b, generator=generator))
_initialise(
    torch.nn.init.normal_, lambda t, mean=0.0, std=1.0, generator=None: t.normal_(mean, std, generator=generator)
)
_initialise(torch.nn.init.constant_, lambda t, val, generator=None: t.fill_(val))
_initialise(torch.nn.init.kaiming_uniform_, _kaiming)
