"""`Local`: the boxes of a tensor that this rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.checkpoint.archive.blocks import checksum
from shardwise.checkpoint.archive.memory import tensor_bytes
from shardwise.checkpoint.archive.stored import whole_on_rank
from shardwise.checkpoint.ranks import Ranks
from shardwise.comm.transfer.views import view_of
from shardwise.errors import CheckpointError, PropertyError, SpecError
from shardwise.layout import Layout
from shardwise.layout.placement import Placement
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import Distributed, is_dtensor, registry, summary
from shardwise.tensor.movement import require_movable
from shardwise.torch_private import FakeTensor


@dataclass(frozen=True, eq=False)
class Local:
    """A tensor of a state: its layout, and the local tensors by row of the layout."""

    layout: Layout
    dtype: torch.dtype
    tensors: dict[int, torch.Tensor]
    plain: bool

    @staticmethod
    def of(name: str, tensor: torch.Tensor, ranks: Ranks) -> Local:
        """The local boxes of a tensor; raises where the tensor cannot be saved."""
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
        return Local(whole_on_rank(tensor.shape, ranks.here), tensor.dtype, {0: tensor}, plain=True)

    def view(self, row: int, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A box of the whole tensor, which lies in this row, as a view of the local tensor."""
        first = self.layout.at([row]).offsets[0].tolist()
        return view_of(self.tensors[row], [at - begin for at, begin in zip(offsets, first, strict=True)], sizes)

    def memory(self) -> tuple[object, ...] | None:
        """A key that tied tensors share: their memory; None where this rank holds no elements."""
        filled = [tensor for tensor in self.tensors.values() if tensor.numel()]
        places = tuple((t.device, t.data_ptr(), t.dtype, t.shape, t.stride(), t.is_conj(), t.is_neg()) for t in filled)
        return (self.plain, places) if places else None

    def checksum(self) -> int:
        """The checksum of the local bytes."""
        return checksum(
            repr([checksum(part) for tensor in self.tensors.values() for part in tensor_bytes(tensor)]).encode()
        )


def rank_in_layout(name: str, tensor: torch.Tensor) -> int | None:
    """The rank of this process in the layout of a tensor; None where the process holds no box, or the tensor is plain.

    The process may have another rank now: it keeps its tensors when the world is resized.
    """
    if is_dtensor(tensor):
        tensor = _shards_of(name, tensor)
    rows = tensor._frame.rows if isinstance(tensor, ShardedTensorBase) else ()
    return int(tensor.sharding.ranks[rows[0]]) if rows else None  # type: ignore[attr-defined] # sharded


def _shards_of(name: str, dtensor: torch.Tensor) -> ShardedTensorBase:
    """The local shards of a DTensor, as views of its memory."""
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
    """The tensor without its graph; raises where it has no plain memory."""
    if isinstance(tensor, FakeTensor):
        raise CheckpointError(f"'{name}' is a FakeTensor, which has no values: give one made outside of FakeTensorMode")
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        what = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}, {tensor.dtype}"
        how = ": give it memory with model.to_empty(device=...) before" if tensor.is_meta else ""
        raise CheckpointError(f"'{name}' is a tensor {what}, which has no plain memory to be written or read{how}")
    return tensor.detach().as_subclass(torch.Tensor)
