"""`Shard`: a box and the tensor that fills it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.errors import PropertyError
from shardwise.layout.metadata import ShardMetadata
from shardwise.layout.placement import Placement, same_device
from shardwise.tensor.dispatch import require_plain


@dataclass(slots=True)
class Shard:
    """A local tensor with the metadata that says which part of the whole it is."""

    tensor: torch.Tensor
    metadata: ShardMetadata

    def __post_init__(self) -> None:
        kinds = type(self.tensor), type(self.metadata)
        if not issubclass(kinds[0], torch.Tensor) or not issubclass(kinds[1], ShardMetadata):
            raise PropertyError(f"a Shard is a tensor and a ShardMetadata, found {[kind.__name__ for kind in kinds]}")
        require_plain(self.tensor, "what a Shard holds")
        if list(self.tensor.size()) != self.metadata.shard_sizes:
            raise PropertyError(
                "Shard tensor size does not match with metadata.shard_lengths! "
                f"Found tensor size {list(self.tensor.size())}, but the metadata says {self.metadata.shard_sizes}"
            )
        placement = self.metadata.placement
        if placement is not None and not same_device(placement.device(), self.tensor.device):
            raise PropertyError(
                "Local shard tensor device does not match with local Shard's placement! "
                f"Found a tensor on {self.tensor.device}, but the placement is {placement}"
            )

    @classmethod
    def trusted(cls, tensor: torch.Tensor, metadata: ShardMetadata) -> Shard:
        """A shard without checks."""
        self = cls.__new__(cls)
        self.tensor, self.metadata = tensor, metadata
        return self

    @classmethod
    def from_tensor_and_offsets(cls, tensor: torch.Tensor, shard_offsets: Sequence[int], rank: int) -> Shard:
        """The shard that begins at these offsets and is all of this tensor, held by this global rank."""
        if not isinstance(tensor, torch.Tensor):
            raise PropertyError(f"a Shard holds a tensor, found {type(tensor).__name__}")
        require_plain(tensor, "what a Shard holds")
        placement = Placement(tensor.device, rank).remote_device()
        return cls(tensor, ShardMetadata(shard_offsets, tensor.size(), placement))


def narrow_tensor_by_index(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The part of a plain tensor that a box holds, as a view."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size < tensor.size(dim):
            tensor = tensor.narrow(dim, min(offset, tensor.size(dim)), size)  # an empty chunk may lie beyond
    return tensor


def narrow_tensor(tensor: torch.Tensor, metadata: ShardMetadata) -> torch.Tensor:
    """The part of a plain tensor that this shard would hold, as a view."""
    return narrow_tensor_by_index(tensor, metadata.shard_offsets, metadata.shard_sizes)
