"""Tensors of a state as they are on this rank: which boxes are here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.archive.blocks import checksum
from shardwise.archive.memory import bytes_of
from shardwise.archive.stored import in_one
from shardwise.checkpoint.ranks import Ranks
from shardwise.dispatch import Distributed, is_dtensor, registry, summary
from shardwise.errors import CheckpointError, PropertyError, SpecError
from shardwise.layout import Layout
from shardwise.placement import Placement
from shardwise.sharded_tensor import ShardedTensorBase
from shardwise.sharded_tensor.movement import require_movable


@dataclass(frozen=True, eq=False)
class Local:
    """A tensor of a state: the layout of the whole, and the rows of it that are here with their tensors."""

    layout: Layout
    dtype: torch.dtype
    tensors: dict[int, torch.Tensor]
    plain: bool

    @staticmethod
    def of(name: str, tensor: torch.Tensor, ranks: Ranks) -> Local:
        """What this rank has of a tensor, or a `CheckpointError` where it has nothing that is a value."""
        if is_dtensor(tensor):
            tensor = _shards_of(name, tensor)
        if isinstance(tensor, ShardedTensorBase):
            return _of_sharded(name, tensor, ranks)
        if isinstance(tensor, Distributed) or hasattr(tensor, "__tensor_flatten__"):
            raise CheckpointError(
                f"'{name}' is a {type(tensor).__name__}, which is neither a plain tensor nor a ShardedTensor or "
                "DTensor: give one of those, by its full_tensor(), or for a PartialTensor by redistribute(spec)"
            )
        tensor = _plain(name, tensor)
        return Local(in_one(tensor.shape, ranks.here), tensor.dtype, {0: tensor}, plain=True)

    def memory(self) -> tuple[object, ...] | None:
        """What two tensors have in common if they are tied; None where nothing is here to tell it by."""
        filled = [tensor for tensor in self.tensors.values() if tensor.numel()]
        places = tuple((t.device, t.data_ptr(), t.dtype, t.shape, t.stride(), t.is_conj(), t.is_neg()) for t in filled)
        return (self.plain, places) if places else None

    def checksum(self) -> int:
        """What the bytes that are here come to."""
        return checksum(
            repr([checksum(part) for tensor in self.tensors.values() for part in bytes_of(tensor)]).encode()
        )


def rank_in_layout(name: str, tensor: torch.Tensor) -> int | None:
    """Which rank this process is in the layout of a tensor; None where it has no box of it, or the tensor is plain.

    It may be another one now: a process keeps its tensors when it leaves a world for another.
    """
    if is_dtensor(tensor):
        tensor = _shards_of(name, tensor)
    rows = tensor._frame.rows if isinstance(tensor, ShardedTensorBase) else ()
    return int(tensor.sharding.ranks[rows[0]]) if rows else None  # type: ignore[attr-defined] # sharded


def _shards_of(name: str, dtensor: torch.Tensor) -> ShardedTensorBase:
    """What is here of a DTensor, over its own memory, so that a load reaches it."""
    try:
        shards: ShardedTensorBase = registry.verbs["shards_of_dtensor"](dtensor)
    except (PropertyError, SpecError) as error:
        raise CheckpointError(f"'{name}': {error}") from error
    return shards


def _of_sharded(name: str, tensor: ShardedTensorBase, ranks: Ranks) -> Local:
    try:
        require_movable(tensor)
    except PropertyError as error:
        raise CheckpointError(f"'{name}': {error}") from error
    layout, rows, dtype = tensor._layout, tensor._frame.rows, tensor.dtype
    if ranks.group is None:
        layout = layout.moved(lambda place: Placement(place.device, ranks.here))
    if (ranks.group is None and len(rows) < len(layout)) or (
        ranks.group is not None and rows != layout.rows_on(ranks.here)
    ):
        raise CheckpointError(
            f"'{name}' is {summary(tensor)}, of which {len(rows)} shards are in this process, which is not what its "
            "layout says: give it on the ranks that hold it"
        )
    found = dict(zip(rows, (_plain(name, local) for local in tensor._local_tensors()), strict=True))
    if any(local.dtype != dtype for local in found.values()):
        raise CheckpointError(f"'{name}' is {dtype}, but a shard of it is of another dtype")
    return Local(layout, dtype, found, plain=False)


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph, if it has bytes."""
    if isinstance(tensor, FakeTensor):
        raise CheckpointError(f"'{name}' is a FakeTensor, which has no values: give one made outside of FakeTensorMode")
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        what = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}, {tensor.dtype}"
        how = ": give it memory with model.to_empty(device=...) before" if tensor.is_meta else ""
        raise CheckpointError(f"'{name}' is a tensor {what}, which has no plain memory to be written or read{how}")
    return tensor.detach().as_subclass(torch.Tensor)
