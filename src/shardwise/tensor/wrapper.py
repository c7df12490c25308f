"""`Wrapper`: a `torch.Tensor` without storage, with a frame and local tensors.

The frame has the size, dtype and layout of the whole tensor. The local tensors have the data and the autograd graph.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import torch
from torch.distributed import ProcessGroup, rpc

from shardwise.autograd.anchors import new_anchor
from shardwise.errors import LeafWriteError, PropertyError, ViewWriteError
from shardwise.layout import Layout
from shardwise.layout.metadata import ShardedTensorMetadata
from shardwise.layout.placement import same_device
from shardwise.layout.specs import ShardingSpec
from shardwise.tensor import assembly
from shardwise.tensor.dispatch import summary
from shardwise.tensor.frame import Frame, Parts
from shardwise.tensor.redistribution_cache import count_write
from shardwise.tensor.shard import Shard
from shardwise.tensor.sparse_gradient import make_dense
from shardwise.tensor.strides import Strides
from shardwise.tensor.torch_function import TorchFunctionTensor
from shardwise.torch_private import make_wrapper_subclass


class Wrapper(TorchFunctionTensor):
    """A frame and local tensors, as a `torch.Tensor`."""

    _tensors: list[torch.Tensor]  # of the rows of the frame, until a caller gets the shards
    _shards: list[Shard] | None = None  # instead of `_tensors` from then on: a caller may assign to `shard.tensor`
    _pinned = False
    _wants_grad = False  # `requires_grad` on a rank without shards
    _shardless_grad: Wrapper | None = None  # `grad` on a rank without shards
    _anchor: torch.Tensor | None = None  # in the autograd graph, instead of local tensors, on a rank without shards
    _root: torch.Tensor | None = None  # the anchor of a leaf; it gets a gradient when the shards do
    _hooks: Any = None  # hooks on the gradient of a leaf
    _retains = False  # whether `retain_grad` was called on a result of an op
    _kept_grad: Wrapper | None = None  # the retained gradient
    _moved = False  # whether an op computed it from data of other ranks
    _copy_of_view = False  # whether it is such a result of a view op: then it must not be written into
    _shares = False  # whether a node behind it, which torch takes for a view, sums the gradients of its replicas
    _sparse_of: list[torch.Tensor] | None = None  # the leaves whose gradients its shards are, if one is sparse
    _view_of: Wrapper | None = None  # the tensor whose memory it shares
    _is_activation = True  # True for intermediate results
    _writes: list[int] | None = None  # a counter of in-place writes, shared with its views, once a reader counts
    _strides: Strides | None = None  # of the whole tensor, if not contiguous
    _cached_move: Any = None  # a copy in another layout, in the redistribution cache
    _init_rrefs = False
    _sharded_tensor_id: int | None = None
    _remote_shards: dict[int, list[rpc.RRef[Shard]]] | None = None
    _known_metadata: ShardedTensorMetadata | None = None

    # Making one -------------------------------------------------------------------------------------------------

    @classmethod
    def _wrap(cls, parts: Parts) -> Self:
        """The wrapper around checked parts."""
        frame = parts.frame
        self: Self = make_wrapper_subclass(cls, frame.size, dtype=frame.dtype, device=frame.device)
        self._fill(parts)
        return self

    def _fill(self, parts: Parts) -> None:
        """Set the parts of a new wrapper."""
        self._frame = parts.frame
        self._tensors = parts.tensors
        self._shards = parts.shards
        self._pinned = parts.pin_memory
        self._is_activation = False
        self._wants_grad = parts.requires_grad

    @classmethod
    def _of_locals(cls, frame: Frame, tensors: list[torch.Tensor]) -> Self:
        """A result with this frame and these local tensors, which carry the autograd graph."""
        new: Self = make_wrapper_subclass(cls, frame.size, dtype=frame.dtype, device=frame.device)
        new._frame, new._tensors = frame, tensors
        return new

    def _like(self, tensors: list[torch.Tensor], dtype: torch.dtype | None = None) -> Any:
        """The same layout, filled with these local tensors: the result of an op that keeps shards where they are."""
        if tensors and dtype in (None, self._frame.dtype):  # the usual case, kept short
            frame = self._frame
            new = make_wrapper_subclass(type(self), frame.size, dtype=frame.dtype, device=frame.device)
            new._frame, new._tensors = frame, tensors
            return new
        return self._derived(self._frame if dtype is None else self._frame.with_dtype(dtype), tensors, self._anchored())

    def _derived(self, frame: Frame, tensors: list[torch.Tensor], anchor: torch.Tensor | None) -> Any:
        """A result of an op on this tensor; on a rank without shards it requires grad as on the other ranks."""
        new = make_wrapper_subclass(type(self), frame.size, dtype=frame.dtype, device=frame.device)
        new._frame = frame
        new._tensors = tensors
        if not tensors and self.requires_grad and torch.is_grad_enabled():
            new._wants_grad = frame.dtype.is_floating_point or frame.dtype.is_complex
            new._anchor = (new_anchor(frame.device) if anchor is None else anchor) if new._wants_grad else None
        return new

    def _anchored(self) -> torch.Tensor | None:
        """The anchor in the graph of a rank without shards; None where there are shards, or no graph."""
        if self._anchor is not None or not self._wants_grad or not torch.is_grad_enabled() or self._local_tensors():
            return self._anchor
        if self._root is None:
            self._root = new_anchor(self._frame.device)
        return self._root

    def _in_graph(self) -> list[torch.Tensor]:
        """The tensors that stand for this one in the graph of this rank: the local ones, or an anchor, or none."""
        tensors, anchor = self._local_tensors(), self._anchored()
        return tensors if tensors or anchor is None else [anchor]

    def _require_writable(self) -> None:
        """Raise on every rank if torch would raise on some, or if this is a copy of a view."""
        base = self
        while base._view_of is not None:
            base = base._view_of
        if torch.is_grad_enabled() and base.requires_grad and base.is_leaf:
            what = "a leaf Variable" if base is self else "a view of a leaf Variable"
            raise LeafWriteError(
                f"{what} that requires grad is being used in an in-place operation: use torch.no_grad() to change it "
                "without recording that, or change a clone()"
            )
        if self._shares and torch.is_grad_enabled():
            raise ViewWriteError(
                "this tensor has replicas, whose gradients are added up where it was made: it cannot be changed in "
                "place while that is recorded. Change a clone()"
            )
        if self._copy_of_view:
            raise ViewWriteError(
                "this tensor would be a view, but its shards had to be moved to make it: what is written into it would "
                "not reach the tensor it was made from. Write into that one, or into a clone()"
            )
        count_write(base)

    def _become(self, frame: Frame, tensors: list[torch.Tensor]) -> None:
        """Replace the frame and the local tensors in place."""
        self._wants_grad, self._anchor, self._shardless_grad, self._root = self.requires_grad, None, None, None
        self._frame, self._tensors, self._shards, self._known_metadata = frame, tensors, None, None
        self._is_activation, self._cached_move, self._strides = False, None, None
        if self._hooks is not None:
            self._hooks.follow(self)

    # On this rank

    def _local_tensors(self) -> list[torch.Tensor]:
        """The tensors of this rank's shards, in the order of the layout."""
        if self._shards is None:
            return self._tensors
        if self._sparse_of is not None:
            make_dense(self._shards, self._sparse_of)
            self._sparse_of = None
        tensors = [shard.tensor for shard in self._shards]
        if tensors and (
            tensors[0].dtype != self._frame.dtype or not same_device(tensors[0].device, self._frame.device)
        ):
            # A caller gave a shard another tensor: its dtype and device are those of the whole tensor from now on.
            self._frame = replace(self._frame, dtype=tensors[0].dtype, device=tensors[0].device)
            self._known_metadata = None
        return tensors

    def _addends(self) -> list[torch.Tensor]:
        """The local tensors, sparse ones too, for adding them to dense tensors."""
        return self._tensors if self._shards is None else [shard.tensor for shard in self._shards]

    def _locals_of(self, other: object) -> list[torch.Tensor]:
        """The local tensors of another tensor of the same sharding, in the order of this one's boxes."""
        if isinstance(other, Wrapper):
            if other._frame is self._frame or other._layout == self._layout:
                return other._local_tensors()
            order = self._layout.order_of(other._layout)
            if order is not None:
                by_row = dict(zip(other._frame.rows, other._local_tensors(), strict=True))
                return [by_row[order[row]] for row in self._frame.rows]
        raise PropertyError(f"expected a tensor that is sharded as {self!r} is, found {summary(other)}")

    @property
    def _layout(self) -> Layout:
        return self._frame.layout

    @property
    def _sharding_spec(self) -> ShardingSpec:
        return self._frame.spec

    @_sharding_spec.setter
    def _sharding_spec(self, spec: ShardingSpec) -> None:
        # Clients assign the spec that they cut by; the layout stays.
        assembly.require_spec(spec)
        self._frame = self._frame.with_spec(spec)

    @property
    def _process_group(self) -> ProcessGroup | None:
        return self._frame.process_group

    @property
    def _local_shards(self) -> list[Shard]:
        if self._shards is None:
            records = [self._layout.shard_metadata(row) for row in self._frame.rows]
            self._shards = [Shard.trusted(*pair) for pair in zip(self._tensors, records, strict=True)]
            self._tensors = []
        return self._shards

    @_local_shards.setter
    def _local_shards(self, shards: list[Shard]) -> None:
        self._shards, self._tensors = shards, []
