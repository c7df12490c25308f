"""The wrapper: a `torch.Tensor` without storage, a frame and the local tensors that fill it.

What it knows of the whole (size, dtype, layout) is in the frame; the data, and the autograd graph, are in the local
tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import torch
from torch.distributed import ProcessGroup, rpc

from shardwise.dispatch import summary
from shardwise.errors import LeafWriteError, PropertyError, ViewWriteError
from shardwise.layout import Layout
from shardwise.metadata import ShardedTensorMetadata
from shardwise.placement import same_device
from shardwise.sharded_tensor import assembly
from shardwise.sharded_tensor.entrance import Entrance
from shardwise.sharded_tensor.frame import Frame, Parts
from shardwise.sharded_tensor.gradients import new_anchor
from shardwise.sharded_tensor.moved_once import count_write
from shardwise.sharded_tensor.shard import Shard
from shardwise.sharded_tensor.sparse_gradient import make_dense
from shardwise.sharded_tensor.strides import Strides
from shardwise.sharding_spec import ShardingSpec

_make_wrapper = torch.Tensor._make_wrapper_subclass


class Wrapper(Entrance):
    """A frame and local tensors, as a `torch.Tensor`."""

    _tensors: list[torch.Tensor]  # what fills the rows of the frame, until shards are handed out
    _shards: list[Shard] | None = None  # then they are the truth, for a caller may assign to `shard.tensor`
    _pinned = False
    _wants_grad = False  # what `requires_grad` says on a rank without shards
    _shardless_grad: Wrapper | None = None  # what `grad` says there
    _anchor: torch.Tensor | None = None  # stands in the autograd graph for the tensors that a rank does not have
    _root: torch.Tensor | None = None  # the same where this tensor is a leaf; it gets a gradient when the shards do
    _hooks: Any = None  # what is to be called with the gradient of a leaf
    _retains = False  # whether the gradient of a result of an op is kept
    _kept_grad: Wrapper | None = None  # which is then this one
    _moved = False  # whether an op made it of data that came from other ranks
    _copy_of_view = False  # whether it is so though torch calls it a view: then nothing may be written into it
    _shares = (
        False  # whether the gradients of its replicas are added up behind it, by a node that torch takes for a view
    )
    _sparse_of: list[torch.Tensor] | None = None  # the leaves whose gradients are its shards, if any of them is sparse
    _view_of: Wrapper | None = None  # the tensor whose memory it shows, or a part of
    _passes = True  # whether an op has made it, and nobody to keep it
    _writes: list[int] | None = None  # how often it was changed in place, or a view of it, since somebody counts
    _strides: Strides | None = None  # those of the whole tensor, where it is not contiguous
    _arrived: Any = None  # what came of it in another layout, for which an op has moved it
    _init_rrefs = False
    _sharded_tensor_id: int | None = None
    _remote_shards: dict[int, list[rpc.RRef[Shard]]] | None = None
    _known_metadata: ShardedTensorMetadata | None = None

    # Making one -------------------------------------------------------------------------------------------------

    @classmethod
    def _wrap(cls, parts: Parts) -> Self:
        """The wrapper around parts that are known to fit."""
        frame = parts.frame
        self = _make_wrapper(cls, frame.size, dtype=frame.dtype, device=frame.device)
        self._fill(parts)
        return self

    def _fill(self, parts: Parts) -> None:
        """Take on these parts, for the first time."""
        self._frame = parts.frame
        self._tensors = parts.tensors
        self._shards = parts.shards
        self._pinned = parts.pin_memory
        self._passes = False
        self._wants_grad = parts.requires_grad

    def _like(self, tensors: list[torch.Tensor], dtype: torch.dtype | None = None) -> Any:
        """The same layout, filled with these local tensors: the result of an op that keeps shards where they are."""
        if tensors and dtype in (None, self._frame.dtype):  # the usual case, as short as can be
            frame = self._frame
            new = _make_wrapper(type(self), frame.size, dtype=frame.dtype, device=frame.device)
            new._frame, new._tensors = frame, tensors
            return new
        return self._derived(self._frame if dtype is None else self._frame.with_dtype(dtype), tensors, self._anchored())

    def _derived(self, frame: Frame, tensors: list[torch.Tensor], anchor: torch.Tensor | None) -> Any:
        """What an op makes of this tensor; on a rank without shards it wants a gradient where others' results do."""
        new = _make_wrapper(type(self), frame.size, dtype=frame.dtype, device=frame.device)
        new._frame = frame
        new._tensors = tensors
        if not tensors and self.requires_grad and torch.is_grad_enabled():
            new._wants_grad = frame.dtype.is_floating_point or frame.dtype.is_complex
            new._anchor = (new_anchor(frame.device) if anchor is None else anchor) if new._wants_grad else None
        return new

    def _anchored(self) -> torch.Tensor | None:
        """What stands in the graph of a rank without shards for them; None where there are shards, or no graph."""
        if self._anchor is not None or not self._wants_grad or not torch.is_grad_enabled() or self._local_tensors():
            return self._anchor
        if self._root is None:
            self._root = new_anchor(self._frame.device)
        return self._root

    def _require_writable(self) -> None:
        """Raise on every rank where torch would on some, or would write through a view that is none."""
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
        """Take on another frame and other local tensors, in place."""
        self._wants_grad, self._anchor, self._shardless_grad, self._root = self.requires_grad, None, None, None
        self._frame, self._tensors, self._shards, self._known_metadata = frame, tensors, None, None
        self._passes, self._arrived, self._strides = False, None, None
        if self._hooks is not None:
            self._hooks.follow(self)

    # What is here of it

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
            # Somebody gave a shard another tensor: the tensor is of that kind from now on.
            self._frame = replace(self._frame, dtype=tensors[0].dtype, device=tensors[0].device)
            self._known_metadata = None
        return tensors

    def _addends(self) -> list[torch.Tensor]:
        """The same to be added to dense tensors, which takes sparse ones as they are."""
        return self._tensors if self._shards is None else [shard.tensor for shard in self._shards]

    def _locals_of(self, other: object) -> list[torch.Tensor]:
        """The local tensors of another tensor that is sharded as this one is, box by box in this one's order."""
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
        # Clients name the rule that they cut by; where the boxes lie is the layout's to say, and stays.
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
