"""What `torch.distributed.checkpoint` asks of a tensor that is not torch's own: its boxes here, and what fills them.

Torch asks by method before it looks at the type, so that sharded tensors are saved and loaded as they are. Boxes
without elements are left out: two boxes may begin at the same place only if one of them is empty, and torch tells boxes
of a tensor apart by where they begin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import LayoutError
from shardwise.geometry import describe

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from shardwise.sharded_tensor.base import ShardedTensorBase


class Checkpointable:
    """The three methods by which `torch.distributed.checkpoint` saves and loads a tensor. No communication."""

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
        held = _offered(self)
        for offsets, _, tensor in held:
            if offsets == index.offset:
                return tensor.detach()
        boxes = ", ".join(describe(offsets, sizes) for offsets, sizes, _ in held) or "none"
        raise LayoutError(f"no box of '{index.fqn}' begins at {index.offset} on this rank, which holds {boxes}")


Held = tuple[torch.Size, torch.Size, torch.Tensor]


def _filled(tensor: ShardedTensorBase) -> list[Held]:
    """The boxes with elements on this rank, and the tensors that fill them."""
    return [held for held in _boxes(tensor) if held[2].numel()]


def _offered(tensor: ShardedTensorBase) -> list[Held]:
    """The boxes to be written: those with elements, or one without where the tensor has none, so that it is known."""
    return _filled(tensor) if tensor.shape.numel() else [held for held in _boxes(tensor) if not any(held[0])]


def _boxes(tensor: ShardedTensorBase) -> list[Held]:
    boxes = tensor._layout.at(tensor._frame.rows)
    pairs = zip(boxes.offsets.tolist(), boxes.sizes.tolist(), tensor._local_tensors(), strict=True)
    return [(torch.Size(offsets), torch.Size(sizes), local) for offsets, sizes, local in pairs]
