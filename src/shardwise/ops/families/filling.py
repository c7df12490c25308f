"""In-place filling, random or not, and `torch.nn.init` on top of it.

With ranks seeded alike, a sharded tensor gets the numbers of a plain tensor of the whole size, whatever the layout, by
the fans of the whole. Under `own_draws`, each rank fills each of its shards like a whole tensor.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwise import settings
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.decomposition import call_decomposed
from shardwise.ops.engine.table import TABLE
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import Op, registry
from shardwise.tensor.random import Draw
from shardwise.tensor.random.fill import equalize_replicas, fill_random
from shardwise.tensor.redistribution_cache import count_write
from shardwise.tensor.strides import memory_order, stand_in
from shardwise.torch_private import correct_fan

aten = torch.ops.aten
RANDOM = (
    aten.uniform_,
    aten.normal_,
    aten.exponential_,
    aten.log_normal_,
    aten.cauchy_,
    aten.geometric_,
    aten.random_,
    aten.bernoulli_.float,
)
CONSTANT = (torch.Tensor.fill_, torch.Tensor.zero_)


def _fill_randomly(call: Call) -> Any:
    """A random fill."""
    target = call.operands[0]
    if not isinstance(target, ShardedTensorBase):
        return NotImplemented
    target._require_writable()
    if torch.is_grad_enabled() and target.requires_grad:
        target.zero_()  # records the gradient of any fill
    order = memory_order(stand_in(target))
    fill_random(target._frame, target._local_tensors(), _draw_of_call(call), call["generator"], order)
    return target


def _draw_of_call(call: Call) -> Draw:
    """The draw of a random fill."""
    function = getattr(torch.Tensor, call.op.overloadpacket.__name__)
    given = tuple(value for name, value in call.arguments.items() if name not in ("self", "generator"))
    return Draw(function, given)


def _fill_constant(op: Op) -> None:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        given = [*args[1:], *kwargs.values()]
        if not isinstance(args[0], ShardedTensorBase) or any(isinstance(one, torch.Tensor) for one in given):
            return call_decomposed(op, args, kwargs)
        args[0]._require_writable()
        for local in args[0]._local_tensors():
            op(local, *args[1:], **kwargs)
        return args[0]

    registry.built_in[op] = handler


def _initialise(function: Op, whole: Op) -> None:
    """Handle a function of `torch.nn.init`: on the whole tensor or, under `own_draws`, on each shard."""

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        # Functions of torch.nn.init that do not dispatch call the ops above.
        tensor = args[0] if args else kwargs["tensor"]
        options = {name: value for name, value in kwargs.items() if name != "tensor"}
        with torch.no_grad():
            if not settings.current().own_draws:
                whole(tensor, *args[1:], **options)
                return tensor
            count_write(tensor)
            for local in tensor._local_tensors():
                if local.numel():  # torch warns of empty tensors
                    function(local, *args[1:], **options)
            equalize_replicas(tensor._layout, tensor._local_tensors(), tensor.dtype, tensor._frame.process_group)
        return tensor

    registry.built_in[function] = handler


def _kaiming_uniform(
    tensor: Any,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: torch.Generator | None = None,
) -> None:
    if 0 in tensor.shape:
        return
    fan = correct_fan(tensor, mode)
    gain = torch.nn.init.calculate_gain(nonlinearity, a)  # type: ignore[arg-type] # torch checks the name
    std = gain / math.sqrt(fan)
    bound = math.sqrt(3.0) * std
    tensor.uniform_(-bound, bound, generator=generator)


TABLE.update(dict.fromkeys(RANDOM, _fill_randomly))
for _constant in CONSTANT:
    _fill_constant(_constant)
_initialise(torch.nn.init.uniform_, lambda t, a=0.0, b=1.0, generator=None: t.uniform_(a, b, generator=generator))
_initialise(
    torch.nn.init.normal_, lambda t, mean=0.0, std=1.0, generator=None: t.normal_(mean, std, generator=generator)
)
_initialise(torch.nn.init.constant_, lambda t, val: t.fill_(val))
_initialise(torch.nn.init.kaiming_uniform_, _kaiming_uniform)
