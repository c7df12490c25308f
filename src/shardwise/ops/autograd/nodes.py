"""From shards, where autograd's graph is, to wrappers that torch itself records, and back: for nodes that see wholes.

A sharded tensor is closed: it becomes a wrapper whose node leads to the shards, and brings each its part of the
gradient. What torch has made of wrappers is opened: it becomes local tensors, whose node puts their gradients together
to the one of the wrapper. A rank without shards has the same nodes, by its anchors.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardwise.autograd.anchors import tie, wants_graph
from shardwise.autograd.recorded_backward import depending
from shardwise.autograd.replicas import recorded, shared_replicas
from shardwise.errors import PropertyError, UnsupportedOpError
from shardwise.layout.specs import FixedShardingSpec
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import Distributed, summary
from shardwise.tensor.frame import Frame, Parts
from shardwise.tensor.partial import PartialTensor
from shardwise.tensor.shard import narrow_tensor_by_index
from shardwise.torch_private import DisableTorchFunctionSubclass, TensorBase

Tensors = list[torch.Tensor]

apply_plain: Any = vars(Function)["apply"].__func__  # torch's own; called with the class


# Closing: from shards to one wrapper in torch's graph --------------------------------------------------------------


@dataclass(frozen=True)
class Whole:
    """What a gradient must look like to reach the shards of an argument."""

    blank: ShardedTensorBase  # of that layout, without its data
    has_anchor: bool

    def parts_of(self, grad: Any) -> tuple[Tensors, torch.Tensor | None]:
        """The local parts of a gradient of any kind, and the anchor that a recorded one has where there are none."""
        frame = self.blank._frame
        if getattr(grad, "shape", None) != frame.size:
            raise PropertyError(f"expected a gradient of size {tuple(frame.size)}, found {summary(grad)}")
        if isinstance(grad, PartialTensor):
            grad = grad._redistributed(FixedShardingSpec.of(frame.layout))
        if not isinstance(grad, ShardedTensorBase):  # the same on every rank
            boxes = frame.layout.at(frame.rows)
            rows = zip(boxes.offsets.tolist(), boxes.sizes.tolist(), strict=True)
            found = [narrow_tensor_by_index(grad, offsets, sizes) for offsets, sizes in rows]
        else:
            lies_alike = grad._layout == frame.layout or frame.layout.order_of(grad._layout) is not None
            if not lies_alike and grad._frame.process_group is not None:
                grad = grad._redistributed(FixedShardingSpec.of(frame.layout))  # type: ignore[attr-defined] # has a group
            elif wants_graph(grad):
                grad = grad._derived(grad._frame, *recorded(grad))
            found = self.blank._locals_of(grad)
        return found, grad._anchored() if isinstance(grad, ShardedTensorBase) else None

    def counted_once(self, grad: Any) -> tuple[Tensors, torch.Tensor | None]:
        """The same where the parts of replicas add up: the first of them has it, the others zeros."""
        frame, (found, anchor) = self.blank._frame, self.parts_of(grad)
        if frame.layout.has_replicas:
            pairs = zip(frame.rows, found, strict=True)
            found = [one if frame.layout.is_first(row) else torch.zeros_like(one) + tie([one]) for row, one in pairs]
        return found, anchor


class _Closed(Function):
    """Local tensors, then perhaps an anchor, as one sharded tensor that torch records."""

    @staticmethod
    def forward(ctx: Any, given: tuple[ShardedTensorBase], has_anchor: bool, *parts: torch.Tensor) -> Any:
        """The wrapper. It computes with these local tensors, and is whatever else the argument is."""
        ctx.set_materialize_grads(False)
        blank = type(given[0])._wrap(Parts(given[0]._frame, []))
        ctx.whole, ctx.gave = Whole(blank, has_anchor), None  # a list, if somebody wants to know what it gives
        made = copy.copy(given[0])
        made._tensors, made._shards = list(parts[: len(parts) - has_anchor]), None
        made._anchor, made._wants_grad = parts[-1] if has_anchor and not made._tensors else None, True
        return made

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """What the user's backward returned for this argument, brought to its shards."""
        whole: Whole = ctx.whole
        if grad is None:
            return (None,) * (2 + len(whole.blank._frame.rows) + whole.has_anchor)
        parts, anchor = whole.counted_once(grad)
        anchors = [tie([] if anchor is None else [anchor])] if whole.has_anchor else []
        if ctx.gave is not None:
            ctx.gave[:] = [*parts, *anchors]
        return None, None, *parts, *anchors


def closed(arg: Any) -> Any:
    """A sharded argument that wants a gradient, closed; any other as it is."""
    if not isinstance(arg, ShardedTensorBase) or not wants_graph(arg):
        return arg
    tensors, anchor = recorded(arg)
    return apply_plain(_Closed, (arg,), anchor is not None, *tensors, *([] if anchor is None else [anchor]))


# Opening: from wrappers in torch's graph to shards -----------------------------------------------------------------


@dataclass(frozen=True)
class _Results:
    """The sharded results of a node, as they are handed out, and what it has saved."""

    node: Any
    tensors: list[ShardedTensorBase]
    watched: list[_SavedTensor]


class _Opened(Function):
    """The local tensors of sharded results, each result's followed by an anchor."""

    @staticmethod
    def forward(ctx: Any, results: _Results, *recorded: torch.Tensor) -> Any:
        """As they are: they become part of the graph."""
        ctx.set_materialize_grads(False)
        ctx.node, ctx.watched = results.node, results.watched
        ctx.frames = [(type(one), one._frame) for one in results.tensors]
        parts: Tensors = []
        for one in results.tensors:
            device = one._frame.device
            parts += [*one._local_tensors(), torch.zeros((), device="cpu" if device.type == "meta" else device)]
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """The gradient of each result, as one sharded tensor."""
        for one in ctx.watched:
            one.notice()
        if torch.is_grad_enabled():
            _require_differentiable(ctx.node, grads)
        made: list[Any] = []
        rest = list(grads)
        for kind, frame in ctx.frames:
            count = len(frame.rows)
            parts, anchor, rest = rest[:count], rest[count], rest[count + 1 :]
            missing = all(part is None for part in (*parts, anchor)) and getattr(ctx.node, "gives_none", True)
            made.append(None if missing else _gradient(kind, frame, parts, anchor))
        return None, *made


class _SavedTensor:
    """A sharded tensor that a node has saved, and whether its local tensors are as they were: torch asks the wrapper.

    It keeps no data, and none of the graph, which leads to who keeps it.
    """

    def __init__(self, saved: ShardedTensorBase, *, is_result: bool) -> None:
        self.locals = [(weakref.ref(local), local._version) for local in saved._local_tensors()]
        self.wrapper: Any = weakref.ref(saved)  # which torch keeps
        if is_result:  # of which torch keeps only what shares its version
            with DisableTorchFunctionSubclass():
                alias: Any = torch.Tensor.detach(saved)
            alias._tensors = []
            self.wrapper = lambda: alias

    def notice(self) -> None:
        """Let torch know if they have been changed in place, so that it refuses to compute a gradient from them."""
        locals_, wrapper = [(local(), version) for local, version in self.locals], self.wrapper()
        changed = any(local is not None and local._version != version for local, version in locals_)
        if changed and wrapper is not None:
            torch.autograd.graph.increment_version(wrapper)


def _gradient(
    kind: type[ShardedTensorBase], frame: Frame, parts: Sequence[torch.Tensor | None], anchor: torch.Tensor | None
) -> ShardedTensorBase:
    """One sharded gradient; shards that nothing depended on have zeros."""
    if any(part is None for part in parts):
        zeros = [torch.zeros(size, dtype=frame.dtype, device=frame.device) for size in _sizes(frame)]
        parts = [zero if part is None else part for part, zero in zip(parts, zeros, strict=True)]
    whole: Tensors = [depending(part) for part in parts if part is not None]
    made = kind._wrap(Parts(frame, whole))
    if not whole and torch.is_grad_enabled():  # recorded, as it is on all other ranks
        made._wants_grad = True
        device = "cpu" if frame.device.type == "meta" else frame.device
        made._anchor = depending(torch.zeros((), device=device) if anchor is None else anchor)
    return made


def _sizes(frame: Frame) -> list[list[int]]:
    sizes: list[list[int]] = frame.layout.at(frame.rows).sizes.tolist()
    return sizes


def _is_recorded(value: Any) -> bool:
    """Whether this is a wrapper that torch itself records; what its `requires_grad` says is of its shards."""
    return isinstance(value, Distributed) and _node_of(value) is not None


def _node_of(wrapper: Any) -> Any:
    with DisableTorchFunctionSubclass():
        return TensorBase.grad_fn.__get__(wrapper)


def _require_differentiable(node: Any, grads: Sequence[torch.Tensor | None]) -> None:
    """Raise in a backward that is recorded where a second one would miss a part of the graph."""
    kind = node._forward_cls
    if getattr(kind.backward, "__code__", None) is _ONCE and any(g is not None and g.requires_grad for g in grads):
        raise UnsupportedOpError(
            f"{kind.__name__} is marked once_differentiable and was asked for a gradient that can be differentiated "
            "again: leave out create_graph=True, or write its backward in differentiable ops"
        )
    if any(_is_recorded(saved) and _node_of(saved) is node for saved in node.saved_tensors):
        raise UnsupportedOpError(
            f"{kind.__name__} was asked for a gradient that can be differentiated again, but it has saved one of its "
            "own sharded results, which torch keeps without its shards' graph: save its arguments and compute the "
            "result anew in the backward, or leave out create_graph=True"
        )


_ONCE = once_differentiable(lambda ctx: None).__code__  # of all that are marked so


def opened(found: Any, args: Sequence[Any]) -> Any:
    """What a Function made of these arguments, with the sharded tensors that torch recorded opened."""
    given = list(found) if isinstance(found, tuple) else [found]
    node = next((_node_of(one) for one in given if isinstance(one, torch.Tensor) and _node_of(one) is not None), None)
    at = [k for k, one in enumerate(given) if _is_recorded(one)]
    if node is not None:
        _have_whole_gradients(node, args)
    if not at:
        return found
    with torch.no_grad():
        tensors = [one._reduced() if isinstance(one, PartialTensor) else one for one in (given[k] for k in at)]
    saved = vars(node).pop("saved_sharded", ())
    watched = [_SavedTensor(one, is_result=_node_of(one) is node) for one in saved]
    parts = list(apply_plain(_Opened, _Results(node, tensors, watched), *[given[k] for k in at]))
    for k, tensor in zip(at, tensors, strict=True):
        frame = tensor._frame
        count = len(frame.rows)
        made: Any = type(tensor)._wrap(Parts(frame, parts[:count]))
        made._wants_grad, made._anchor = not count, None if count else parts[count]
        parts = parts[count + 1 :]
        if frame.layout.has_replicas and frame.process_group is not None:
            made = made._derived(frame, *shared_replicas(made, frame.process_group))
            made._shares = True
        made.grad_fn.stands_for = node
        given[k] = made
    return tuple(given) if isinstance(found, tuple) else given[0]


def _have_whole_gradients(node: Any, args: Sequence[Any]) -> None:
    """Have a node give plain arguments, which are the same on every rank, whole gradients, not sharded ones."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    plain = {k for k, arg in enumerate(tensors) if not isinstance(arg, Distributed) and arg.requires_grad}

    def gathered(grads: Sequence[Any], _: Any) -> Any:
        pairs = enumerate(grads)
        return tuple(g.full_tensor() if k in plain and isinstance(g, Distributed) else g for k, g in pairs)  # type: ignore[attr-defined] # both kinds have it

    if plain:
        node.register_hook(gathered)
