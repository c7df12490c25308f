"""`ShardedTensorBase`: the wrapper, what it knows of the whole tensor, and what is here of it.

It is a `torch.Tensor` without storage. What it knows of the whole (size, dtype, layout) are plain attributes; the data,
and the autograd graph, are in the local shards.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch.distributed import ProcessGroup, rpc

from shardwise.dispatch import Distributed, distributed_in, refuse_mixed, registry, summary, unsupported
from shardwise.errors import DimRangeError, LocalTensorError, PropertyError, ViewWriteError
from shardwise.layout import Layout
from shardwise.metadata import ShardedTensorMetadata, TensorProperties
from shardwise.placement import same_device
from shardwise.sharded_tensor import assembly, pickling
from shardwise.sharded_tensor.checkpointable import Checkpointable
from shardwise.sharded_tensor.failure import ENTRANCES, leaves
from shardwise.sharded_tensor.frame import Frame, Parts
from shardwise.sharded_tensor.gradients import new_anchor
from shardwise.sharded_tensor.moved_once import count_write, writes_of
from shardwise.sharded_tensor.shard import Shard
from shardwise.sharded_tensor.sparse_gradient import make_dense
from shardwise.sharding_spec import ShardingSpec
from shardwise.tracing import record
from shardwise.viz import Picture, layout_picture

_make_wrapper = torch.Tensor._make_wrapper_subclass
FIRST = ("input", "self", "tensor", "tensors", "outputs")  # names that torch gives to first arguments


class ShardedTensorBase(Checkpointable, Distributed, torch.Tensor):
    """A sharded tensor that need not belong to a process group."""

    _frame: Frame  # what it has in common with others of its sharding, dtype and group
    _tensors: list[torch.Tensor]  # what fills the rows of the frame, until shards are handed out
    _shards: list[Shard] | None = None  # then they are the truth, for a caller may assign to `shard.tensor`
    _pinned = False
    _wants_grad = False  # what `requires_grad` says on a rank without shards
    _shardless_grad: ShardedTensorBase | None = None  # what `grad` says there
    _anchor: torch.Tensor | None = None  # stands in the autograd graph for the tensors that a rank does not have
    _root: torch.Tensor | None = None  # the same where this tensor is a leaf; it gets a gradient when the shards do
    _hooks: Any = None  # what is to be called with the gradient of a leaf
    _retains = False  # whether the gradient of a result of an op is kept
    _kept_grad: ShardedTensorBase | None = None  # which is then this one
    _moved = False  # whether an op made it of data that came from other ranks
    _copy_of_view = False  # whether it is so though torch calls it a view: then nothing may be written into it
    _shares = (
        False  # whether the gradients of its replicas are added up behind it, by a node that torch takes for a view
    )
    _sparse_of: list[torch.Tensor] | None = None  # the leaves whose gradients are its shards, if any of them is sparse
    _view_of: ShardedTensorBase | None = None  # the tensor whose memory it shows, or a part of
    _passes = True  # whether an op has made it, and nobody to keep it
    _writes: list[int] | None = None  # how often it was changed in place, or a view of it, since somebody counts
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
        count_write(base)
        if base is not self and torch.is_grad_enabled() and base.requires_grad and base.is_leaf:
            raise ViewWriteError(
                "a view of a leaf that requires grad cannot be written into while that is recorded: use torch.no_grad()"
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

    def _become(self, frame: Frame, tensors: list[torch.Tensor]) -> None:
        """Take on another frame and other local tensors, in place."""
        self._wants_grad, self._anchor, self._shardless_grad, self._root = self.requires_grad, None, None, None
        self._frame, self._tensors, self._shards, self._known_metadata = frame, tensors, None, None
        self._passes, self._arrived = False, None
        if self._hooks is not None:
            self._hooks.follow(self)

    @classmethod
    def _init_from_local_shards_and_global_metadata(
        cls,
        local_shards: list[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        sharding_spec: ShardingSpec | None = None,
    ) -> Self:
        """A tensor from this process's shards and metadata that is known everywhere. No communication."""
        return cls._wrap(assembly.from_global_metadata(local_shards, sharded_tensor_metadata, sharding_spec, None))

    # What is here, and what is known of the whole ---------------------------------------------------------------

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
        if isinstance(other, ShardedTensorBase):
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
    def sharding(self) -> Layout:
        """Which boxes lie on which ranks. ``make_plan(a.sharding, b.sharding)`` is the way from one to another."""
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

    @property
    def _metadata(self) -> ShardedTensorMetadata:
        if self._known_metadata is None:
            dtype, grad = self._frame.dtype, self.requires_grad
            properties = TensorProperties(dtype, requires_grad=grad, pin_memory=self._pinned)
            self._known_metadata = self._layout.metadata(properties)
        self._known_metadata.tensor_properties.requires_grad = self.requires_grad
        return self._known_metadata

    def metadata(self) -> ShardedTensorMetadata:
        """Every shard on every rank, the size and the tensor properties. Built on first use. No communication."""
        return self._metadata

    def local_shards(self) -> list[Shard]:
        """This rank's shards; an empty list when it holds none."""
        return self._local_shards

    def local_tensor(self) -> torch.Tensor:
        """The tensor of this rank's only shard."""
        tensors = self._local_tensors()
        if len(tensors) != 1:
            raise LocalTensorError(
                f"Only single local shard is supported. Number of shards: {len(tensors)}; use local_shards()"
            )
        return tensors[0]

    def sharding_spec(self) -> ShardingSpec:
        """The spec that this tensor is sharded by."""
        return self._frame.spec

    def is_pinned(self) -> bool:  # type: ignore[override] # the old system takes no device here
        """Whether the local shards lie in pinned memory."""
        tensors = self._local_tensors()
        return tensors[0].is_pinned() if tensors else self._pinned

    # A torch.Tensor's attributes, without dispatch ----------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:  # type: ignore[override] # torch declares an attribute
        """The size of the whole tensor."""
        return self._frame.size

    def size(self, dim: int | None = None) -> Any:
        """The size of the whole tensor, or of one dim."""
        try:
            return self._frame.size if dim is None else self._frame.size[dim]
        except IndexError:
            ndim = len(self._frame.size)
            reach = f"expected to be in range of [{-max(ndim, 1)}, {max(ndim, 1) - 1}], but got {dim}"
            raise DimRangeError(f"Dimension out of range ({reach}) of a tensor of {ndim} dims") from None

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override] # torch declares an attribute
        """The dtype of every shard."""
        if self._shards is not None:
            self._local_tensors()
        return self._frame.dtype

    @property
    def ndim(self) -> int:  # type: ignore[override] # torch declares an attribute
        """Number of dims."""
        return len(self._frame.size)

    def dim(self) -> int:
        """Number of dims."""
        return len(self._frame.size)

    def numel(self) -> int:
        """Number of elements of the whole tensor, on all ranks together."""
        return self._frame.size.numel()

    @property
    def device(self) -> torch.device:  # type: ignore[override] # torch declares an attribute
        """The device of this rank's shards; without any, the one this rank would use."""
        if self._shards is not None:
            self._local_tensors()
        return self._frame.device

    @property
    def is_meta(self) -> bool:  # type: ignore[override] # torch declares an attribute
        """Whether the shards have a size but no data."""
        return self.device.type == "meta"

    def __len__(self) -> int:
        if not self._frame.size:
            raise TypeError("len() of a 0-d tensor")
        return self._frame.size[0]

    # Autograd: the graph is in the shards -----------------------------------------------------------------------

    @property
    def requires_grad(self) -> bool:
        """Whether any shard records operations."""
        tensors = self._local_tensors()
        return any(tensor.requires_grad for tensor in tensors) if tensors else self._wants_grad

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        for tensor in self._local_tensors() or [torch.empty(0, dtype=self.dtype)]:  # which refuses what shards would
            tensor.requires_grad = requires_grad
        self._wants_grad, self._arrived = requires_grad, None
        self._anchor, self._root = (self._anchor, self._root) if requires_grad else (None, None)
        if requires_grad and self._hooks is not None:
            self._hooks.follow(self)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Record operations on every shard, from now on; a result that is recorded anyway stays as it is."""
        if not (requires_grad and self.requires_grad and not self.is_leaf):
            self.requires_grad = requires_grad
        return self

    @property
    def is_leaf(self) -> bool:  # type: ignore[override] # torch declares an attribute
        """Whether no shard is the result of a recorded operation."""
        return all(tensor.is_leaf for tensor in self._local_tensors()) and self._anchor is None

    @property
    def grad_fn(self) -> Any:  # type: ignore[override] # torch declares an attribute
        """The node that made this rank's first shard, or its anchor; of a custom Function's result, the Function's."""
        first = next(iter(self._local_tensors()), self._anchor)
        node = None if first is None else first.grad_fn
        return getattr(node, "stands_for", node)

    @property  # type: ignore[override] # torch declares an attribute
    def grad(self) -> ShardedTensorBase | None:
        """The shards' gradients as one sharded tensor over the same memory; None before there is any."""
        if self._retains:
            return self._kept_grad
        tensors = self._local_tensors()
        grads = [tensor.grad for tensor in tensors]
        if not tensors and self._shardless_grad is None and self._root is not None and self._root.grad is not None:
            empty: ShardedTensorBase = self._like([])
            empty._wants_grad, empty._anchor = self._root.grad.requires_grad, None
            self._shardless_grad, self._root.grad = empty, None
        if all(grad is None for grad in grads):
            return self._shardless_grad
        for k, (tensor, grad) in enumerate(zip(tensors, grads, strict=True)):
            if grad is None:  # a shard that nothing depended on
                grads[k] = tensor.grad = torch.zeros_like(tensor)
        made: ShardedTensorBase = self._like(grads)  # type: ignore[arg-type] # none is None any more
        if any(grad is not None and grad.is_sparse for grad in grads):
            made._sparse_of, _ = tensors, made._local_shards
        return made

    @grad.setter
    def grad(self, grad: ShardedTensorBase | None) -> None:
        self._kept_grad = grad if self._retains else None
        if self._retains:
            return
        if grad is None:
            for tensor in self._local_tensors():
                tensor.grad = None
        else:
            for tensor, shard_grad in zip(self._local_tensors(), self._locals_of(grad), strict=True):
                tensor.grad = shard_grad
        self._shardless_grad = None if self._frame.rows else grad
        if self._root is not None:
            self._root.grad = None

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    # Python's protocols -----------------------------------------------------------------------------------------

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # torch says Any
        rows, ranks = self._frame.rows, len(self._layout.places.different_ranks)
        shards = f"{len(self._layout)} shard{'s' * (len(self._layout) != 1)} on {ranks} rank{'s' * (ranks != 1)}"
        here = ", ".join(map(self._layout.at(rows[:3]).describe, range(len(rows[:3])))) or "none"
        more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
        grad = ", requires_grad=True" if self.requires_grad else ""
        whole = f"{tuple(self.shape)}, {self.dtype}, {shards}"
        return f"{type(self).__name__}({whole}, here {here}{more} on {self.device}{grad})"

    def __format__(self, spec: str) -> str:
        """``f"{loss:.3f}"`` is that of `item`, which every rank calls; without a format nothing is sent."""
        return format(self.item() if spec and not self.ndim else repr(self), spec)

    def _picture_(self, *, dtype: torch.dtype | None = None, **options: Any) -> Picture:
        kind, here = type(self).__name__, self._frame.rows
        return layout_picture(self._layout, kind=kind, dtype=dtype or self.dtype, here=here, **options)

    def _repr_html_(self) -> str:
        return self._picture_().html()

    def __copy__(self) -> Any:
        new = self._like(list(self._local_tensors()))
        new._anchor = self._anchor
        writes_of(self)  # which both have
        new.__dict__.update({name: value for name, value in vars(self).items() if name not in vars(new)})
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        new = self._like([copy.deepcopy(tensor, memo) for tensor in self._local_tensors()])
        memo[id(self)] = new
        new._anchor, new._wants_grad, new._shardless_grad = (
            None,
            self._wants_grad,
            copy.deepcopy(self._shardless_grad, memo),
        )
        # The rest is what others hung on the tensor, such as the mark that makes it a parameter.
        shared = vars(new).keys() | vars(ShardedTensorBase).keys() | {"_known_metadata"}
        for name, value in vars(self).items():
            if name not in shared:
                new.__dict__[name] = copy.deepcopy(value, memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        return registry.verbs["rebuild"], (pickling.state_of(self),)

    # Dispatch ---------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        refuse_mixed(func, args, kwargs)
        tensor = args[0] if args else None
        if isinstance(tensor, list | tuple) and tensor:
            tensor = tensor[0]
        if not isinstance(tensor, ShardedTensorBase):
            tensor = next((t for t in distributed_in(args, kwargs) if isinstance(t, ShardedTensorBase)), None)
            if tensor is None:
                raise unsupported(func, args, kwargs, "no sharded tensor was found among the arguments")
        frame = tensor._frame
        handler = registry.find(func, frame.spec_class)
        entered = record.enter(func) if record.running else None
        try:
            if handler is None:
                return registry.verbs["descend"](func, args, kwargs or {})
            if not args and kwargs:  # handlers find the first argument in its place
                name = next((name for name in FIRST if name in kwargs), None)
                if name is None:
                    return registry.verbs["descend"](func, args, kwargs)
                args, kwargs = (kwargs[name],), {key: value for key, value in kwargs.items() if key != name}
            return handler(types, args, kwargs or {}, frame.process_group)
        except Exception as error:
            leaves(error, frame.process_group)
            raise
        finally:
            if entered is not None:
                entered.leave()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's is no method
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return registry.verbs["aten"](func, args, kwargs or {})


ENTRANCES.add(ShardedTensorBase.__torch_function__.__code__)
