"""`GraphOutline`: what a graph of local tensors has in common with graphs of other sizes, apart from its integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from shardwise.compilation.full_graph.graph_ops import found_transfer
from shardwise.torch_private import pytree

ALIGNMENT = 16  # bytes


class GraphOutline(NamedTuple):
    """The parts of a graph, and of the tensors that it takes."""

    common: tuple[Any, ...]  # all but what follows
    integers: tuple[int, ...]  # extents of the inputs, then those among the arguments of the nodes, in order
    orders: tuple[Any, ...]  # how each input lies in memory
    is_aligned: tuple[bool, ...]  # whether each begins where kernels of a GPU may read many elements at once
    transfers: tuple[str, ...]  # their keys

    @classmethod
    def of(cls, graph: fx.Graph, inputs: Sequence[Any]) -> GraphOutline | None:
        """None if the graph has parts that cannot be compared, such as tensors that are constants."""
        if not all(isinstance(one, torch.Tensor) and _has_known_size(one) for one in inputs):
            return None
        numbers = {node: k for k, node in enumerate(graph.nodes)}
        common: list[Any] = [(one.dtype, one.device, one.dim()) for one in inputs]
        integers = [extent for one in inputs for extent in one.shape]
        transfers: list[str] = []
        for node in graph.nodes:
            if node.op not in ("placeholder", "call_function", "output"):
                return None
            leaves, structure = pytree.tree_flatten(arguments_of(node))
            common += [node.op, None if node.op == "placeholder" else node.target, structure]
            for leaf in leaves:
                if type(leaf) is int:
                    integers.append(leaf)
                else:
                    common.append(("node", numbers[leaf]) if isinstance(leaf, fx.Node) else _constant(leaf))
            if is_transfer(node):
                transfers.append(node.args[2])
        orders, are_aligned = tuple(map(_order_of, inputs)), tuple(map(_is_aligned, inputs))
        made = cls(tuple(common), tuple(integers), orders, are_aligned, tuple(transfers))
        return made if _is_hashable(made) else None


def _has_known_size(tensor: torch.Tensor) -> bool:
    return all(type(one) is int for one in (*tensor.shape, *tensor.stride()))


def _constant(leaf: Any) -> tuple[Any, ...]:
    """A constant in a form that tells True from 1.0, and 0.0 from -0.0."""
    return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def is_transfer(node: fx.Node) -> bool:
    """Whether a node is the op by which data goes between ranks."""
    return node.target is torch.ops.shardwise.transfer.default


def arguments_of(node: fx.Node) -> tuple[Any, Any]:
    """Positional and keyword arguments; of a transfer, the form and the extents of its results instead of its key."""
    if not is_transfer(node):
        return node.args, node.kwargs
    token, tensors, key = node.args
    sizes = found_transfer(str(key)).sizes()
    form = ";".join(f"{len(size)} {str(dtype).removeprefix('torch.')} {device}" for size, dtype, device in sizes)
    return (token, tensors, form, [extent for size, _, _ in sizes for extent in size]), {}


def _order_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The dims, from the outermost to the innermost, if a tensor is contiguous but for their order; else strides."""
    dims = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride()[dim], tensor.shape[dim] == 1, dim))
    return ("dims", *dims) if tensor.permute(dims).is_contiguous() else ("strides", *tensor.stride())


def _is_aligned(tensor: torch.Tensor) -> bool:
    return int(tensor.storage_offset()) * tensor.element_size() % ALIGNMENT == 0


def tensor_in_order(order: tuple[Any, ...], shape: Sequence[Any], like: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape that lies in memory as `_order_of` says."""
    kind, *numbers = order
    options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    if kind == "strides":
        return torch.empty_strided(list(shape), numbers, **options)
    back = sorted(range(len(numbers)), key=numbers.__getitem__)
    return torch.empty([shape[dim] for dim in numbers], **options).permute(back)
