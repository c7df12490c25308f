"""The methods by which `torch.distributed.checkpoint` saves and loads a tensor of another class.

Torch calls them before it looks at the type. Boxes without elements are left out: torch tells the boxes of a tensor
apart by their offsets, and only an empty box can have the offsets of another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import LayoutError
from shardwise.layout.geometry import describe

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from shardwise.tensor.base import ShardedTensorBase


class Checkpointable:
    """The three methods of a tensor that `torch.distributed.checkpoint` saves and loads. No communication."""

    def __create_write_items__(self: Any, fqn: str, object: Any) -> list[WriteItem]:
        """One item for each box here. Every rank that holds a box offers it; torch's planner has it written once."""
        # Not at the top: this imports the old system, and is loaded already when torch calls.
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        items = []
        for offsets, sizes, tensor in _offered(self):
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(offsets, sizes),
                properties=TensorProperties.create_from_tensor(tensor),
                size=self.shape,
            )
            items.append(WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self: Any) -> list[ChunkStorageMetadata]:
        """The boxes here that are to be read."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offsets, sizes) for offsets, sizes, _ in _filled(self)]

    def __get_tensor_shard__(self: Any, index: MetadataIndex) -> torch.Tensor:
        """The memory of the box that begins there."""
        if index.offset is None:
            raise LayoutError(f"cannot look up '{index.fqn}': it is a ShardedTensor, and no offset was provided")
        offered = _offered(self)
        for offsets, _, tensor in offered:
            if offsets == index.offset:
                return tensor.detach()
        boxes = ", ".join(describe(offsets, sizes) for offsets, sizes, _ in offered) or "none"
        raise LayoutError(f"no box of '{index.fqn}' begins at {index.offset} on this rank, which holds {boxes}")


LocalBox = tuple[torch.Size, torch.Size, torch.Tensor]


def _filled(tensor: ShardedTensorBase) -> list[LocalBox]:
    """The boxes with elements on this rank, and the tensors that fill them."""
    return [box for box in _boxes(tensor) if box[2].numel()]


def _offered(tensor: ShardedTensorBase) -> list[LocalBox]:
    """The boxes to be written: those with elements, or an empty one of an empty tensor, so that the file names it."""
    return _filled(tensor) if tensor.shape.numel() else [box for box in _boxes(tensor) if not any(box[0])]


def _boxes(tensor: ShardedTensorBase) -> list[LocalBox]:
    boxes = tensor._layout.at(tensor._frame.rows)
    pairs = zip(boxes.offsets.tolist(), boxes.sizes.tolist(), tensor._local_tensors(), strict=True)
    return [(torch.Size(offsets), torch.Size(sizes), local) for offsets, sizes, local in pairs]
