"""`Carried`: a plain operand that wants a gradient, on its way through torch into aten ops.

On that way autograd is left out, for the graph is in the shards. What torch does to a plain operand there (`einsum`
transposes it, say) would be lost to autograd. Carried, it comes back for each such step, which is then recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardwise.dispatch import Distributed, registry


class Carried(torch.Tensor):
    """Stands for a plain tensor that wants a gradient, where torch only asks for attributes and calls aten ops."""

    plain: torch.Tensor

    @staticmethod
    def of(plain: torch.Tensor) -> Carried:
        """In the place of this tensor."""
        self: Carried = torch.Tensor._make_wrapper_subclass(
            Carried,
            plain.shape,
            strides=plain.stride(),
            storage_offset=plain.storage_offset(),
            dtype=plain.dtype,
            device=plain.device,
            requires_grad=True,  # which functions ask before they prepare a backward
        )
        self.plain = plain
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's is no method
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return registry.verbs["aten"](func, args, kwargs or {})


def carry(value: Any) -> Any:
    """The same arguments, with plain tensors that want a gradient carried; the same object if there are none."""
    if isinstance(value, torch.Tensor):
        wanted = value.requires_grad and not isinstance(value, Distributed | Carried) and value.layout == torch.strided
        return Carried.of(value) if wanted else value
    if isinstance(value, list | tuple):
        made = [carry(one) for one in value]
        return value if all(one is old for one, old in zip(made, value, strict=True)) else type(value)(made)
    if isinstance(value, dict):
        carried = {name: carry(one) for name, one in value.items()}
        return value if all(carried[name] is value[name] for name in value) else carried
    return value


def put_down(tree: Any) -> Any:
    """The plain tensors themselves again, wherever they are carried."""
    return pytree.tree_map(lambda leaf: leaf.plain if isinstance(leaf, Carried) else leaf, tree)


def holds_carried(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether any argument of an aten op is carried."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Carried) or (
            isinstance(value, list | tuple) and any(isinstance(one, Carried) for one in value)
        ):
            return True
    return False
