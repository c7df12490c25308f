"""`GradientProxy`: stands for a plain operand that wants a gradient while torch breaks a function down into aten ops.

Meanwhile autograd is off, for the graph is in the shards. What torch does to a plain operand there (`einsum` transposes
it, say) would be lost to autograd. A proxy brings each such op back to the library, which records it on the operand.
While a compiler traces, proxies stand for all plain operands: the compiler's own tensors refuse to meet sharded ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm.transfer.in_graph import is_traced
from shardwise.tensor.dispatch import Distributed, registry
from shardwise.torch_private import make_wrapper_subclass, pytree


class GradientProxy(torch.Tensor):
    """In place of a plain tensor that wants a gradient, where torch only asks for attributes and calls aten ops."""

    plain: torch.Tensor

    @staticmethod
    def of(plain: torch.Tensor) -> GradientProxy:
        """The proxy of this tensor."""
        self: GradientProxy = make_wrapper_subclass(
            GradientProxy,
            plain.shape,
            strides=plain.stride(),
            storage_offset=plain.storage_offset(),
            dtype=plain.dtype,
            device=plain.device,
            requires_grad=plain.requires_grad,  # which functions ask before they prepare a backward
        )
        self.plain = plain
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's is no method
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return registry.verbs["aten"](func, args, kwargs or {})


def with_proxies(value: Any) -> Any:
    """The same arguments, with proxies for plain tensors that want a gradient; the same object if there are none."""
    if isinstance(value, torch.Tensor):
        is_plain = not isinstance(value, Distributed | GradientProxy) and value.layout == torch.strided
        return GradientProxy.of(value) if is_plain and (value.requires_grad or is_traced()) else value
    if isinstance(value, list | tuple):
        made = [with_proxies(one) for one in value]
        return value if all(one is old for one, old in zip(made, value, strict=True)) else type(value)(made)
    if isinstance(value, dict):
        named = {name: with_proxies(one) for name, one in value.items()}
        return value if all(named[name] is value[name] for name in value) else named
    return value


def unwrap(tree: Any) -> Any:
    """The plain tensors in place of their proxies."""
    return pytree.tree_map(lambda leaf: leaf.plain if isinstance(leaf, GradientProxy) else leaf, tree)


def holds_proxy(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether any argument of an aten op is a proxy."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, GradientProxy) or (
            isinstance(value, list | tuple) and any(isinstance(one, GradientProxy) for one in value)
        ):
            return True
    return False
