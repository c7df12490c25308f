"""Tensors of a state as they are on this rank: which boxes are here, and their memory as bytes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shardwise.checkpoint.index import in_one
from shardwise.checkpoint.ranks import Ranks
from shardwise.dispatch import Distributed, is_dtensor, registry, summary
from shardwise.errors import CheckpointError, PropertyError, SpecError
from shardwise.layout import Layout
from shardwise.placement import Placement
from shardwise.sharded_tensor import ShardedTensorBase
from shardwise.sharded_tensor.movement import require_movable
from shardwise.transfer.views import as_bytes, cut, is_as_it_lies, resolved

STAGED = 16 * 2**20  # bytes that are copied at a time where memory cannot be written or read as it lies


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
        found = 0
        for tensor in self.tensors.values():
            for part in bytes_of(tensor):
                found = zlib.crc32(part, found)
        return found


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
            "layout says: save and load it on the ranks that hold it"
        )
    found = dict(zip(rows, (_plain(name, local) for local in tensor._local_tensors()), strict=True))
    if any(local.dtype != dtype for local in found.values()):
        raise CheckpointError(f"'{name}' is {dtype}, but a shard of it is of another dtype")
    return Local(layout, dtype, found, plain=False)


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph, if it has bytes."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        what = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}, {tensor.dtype}"
        raise CheckpointError(f"'{name}' is a tensor {what}, which has no plain memory to be written or read")
    return tensor.detach().as_subclass(torch.Tensor)


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return memoryview(as_bytes(tensor).numpy())  # type: ignore[arg-type] # arrays have a buffer


def lies_plain(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is, as it lies, the bytes of its values in order."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and is_as_it_lies(tensor)


def view_of(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """A box of a tensor, as a view."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in order: its own memory, or where that is elsewhere or strided, copies of one part at a
    time."""
    if not tensor.numel():
        return
    if lies_plain(tensor):
        yield buffer_of(tensor)
        return
    box = [0] * tensor.ndim, list(tensor.shape)
    for offsets, sizes in cut(box, max(STAGED // tensor.element_size(), 1)):
        part = resolved(view_of(tensor, offsets, sizes)).contiguous()
        yield buffer_of(part.cpu())
