"""`ShardedTensorBase`: attributes of a sharded tensor that need no dispatch, of the whole tensor and of this rank."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Self

import torch

from shardwise.errors import DimRangeError, LocalTensorError, PropertyError
from shardwise.layout import Layout
from shardwise.layout.metadata import ShardedTensorMetadata, TensorProperties
from shardwise.layout.pictures import Picture, layout_picture
from shardwise.layout.specs import ShardingSpec
from shardwise.tensor import assembly, pickling
from shardwise.tensor.checkpointable import Checkpointable
from shardwise.tensor.dispatch import registry, unsupported
from shardwise.tensor.redistribution_cache import writes_of
from shardwise.tensor.shard import Shard
from shardwise.tensor.wrapper import Wrapper

MOST_ROWS = 2**14  # of a loop over a tensor: it takes up to a millisecond to make one


class ShardedTensorBase(Checkpointable, Wrapper):
    """A sharded tensor that need not belong to a process group."""

    _shardless_grad: ShardedTensorBase | None
    _kept_grad: ShardedTensorBase | None

    @classmethod
    def _init_from_local_shards_and_global_metadata(
        cls,
        local_shards: list[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        sharding_spec: ShardingSpec | None = None,
    ) -> Self:
        """A tensor from this process's shards and metadata that is known everywhere. No communication."""
        return cls._wrap(assembly.from_global_metadata(local_shards, sharded_tensor_metadata, sharding_spec, None))

    # Of the whole tensor

    @property
    def sharding(self) -> Layout:
        """Which boxes lie on which ranks. ``make_plan(a.sharding, b.sharding)`` is the way from one to another."""
        return self._frame.layout

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
        for tensor in self._local_tensors() or [torch.empty(0, dtype=self.dtype)]:  # refuses integers too
            tensor.requires_grad = requires_grad
        self._wants_grad, self._cached_move = requires_grad, None
        self._anchor, self._root = (self._anchor, self._root) if requires_grad else (None, None)
        if requires_grad and self._hooks is not None:
            self._hooks.follow(self)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Record operations on every shard from now on; no change for a result that autograd records."""
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
        if len(tensors) == 1 and (only := tensors[0].grad) is not None and not only.is_sparse:  # the usual case
            usual: ShardedTensorBase = self._like([only])
            return usual
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
        whole: ShardedTensorBase = self._like(grads)  # type: ignore[arg-type] # none is None any more
        if any(grad is not None and grad.is_sparse for grad in grads):
            whole._sparse_of, _ = tensors, whole._local_shards
        return whole

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

    def __iter__(self) -> Iterator[Any]:
        """The rows, each sharded. Every rank loops over all of them."""
        if self.ndim and len(self) > MOST_ROWS:
            raise unsupported(
                torch.Tensor.__iter__,
                (self,),
                {},
                f"a loop over a sharded tensor makes a sharded tensor of each of its {len(self):,} rows, which is slow",
                "Loop over full_tensor(), or over parts such as x[:1000], or compute on all rows at once",
            )
        return iter(super().__iter__())  # type: ignore[no-untyped-call] # torch's

    def __format__(self, spec: str) -> str:
        """``f"{loss:.3f}"`` formats `item()`, so every rank calls it; without a format nothing is sent."""
        try:
            return format(self.item() if spec and not self.ndim else repr(self), spec)
        except ValueError as error:
            raise PropertyError(
                f"{self!r} is no number that could be formatted as {spec!r}: format item() of a tensor with one "
                "element, or elements of full_tensor()"
            ) from error

    def _picture_(self, *, dtype: torch.dtype | None = None, **options: Any) -> Picture:
        kind, here = type(self).__name__, self._frame.rows
        return layout_picture(self._layout, kind=kind, dtype=dtype or self.dtype, here=here, **options)

    def _repr_html_(self) -> str:
        return self._picture_().html()

    def __copy__(self) -> Any:
        new = self._like(list(self._local_tensors()))
        new._anchor = self._anchor
        writes_of(self)  # makes the counter, which the copy shares
        new.__dict__.update({name: value for name, value in vars(self).items() if name not in vars(new)})
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        keeps_grad = not isinstance(self, torch.nn.Parameter)  # as torch does: a parameter's copy has no gradient
        new = self._like([_copied(tensor, memo, keeps_grad=keeps_grad) for tensor in self._local_tensors()])
        memo[id(self)] = new
        new._strides = self._strides
        new._anchor, new._wants_grad = None, self._wants_grad
        shardless = self.grad if keeps_grad and not new._tensors else None
        new._shardless_grad = copy.deepcopy(shardless, memo)
        # The rest are attributes that others set, such as the mark that makes the tensor a parameter.
        shared = vars(new).keys() | vars(Wrapper).keys() | {"_known_metadata"}
        for name, value in vars(self).items():
            if name not in shared:
                new.__dict__[name] = copy.deepcopy(value, memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        return registry.verbs["rebuild"], (pickling.state_of(self),)


def _copied(tensor: torch.Tensor, memo: dict[int, Any], *, keeps_grad: bool) -> torch.Tensor:
    """A deep copy of a local tensor."""
    if id(tensor) in memo or keeps_grad or not tensor.is_leaf:  # torch refuses to copy non-leaves
        return copy.deepcopy(tensor, memo)
    bare = tensor.detach()
    new: torch.Tensor = copy.deepcopy(bare, memo).requires_grad_(tensor.requires_grad)
    del memo[id(bare)]  # a temporary
    memo[id(tensor)] = new  # for others that refer to the tensor, such as an optimizer
    return new
