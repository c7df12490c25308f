"""The metadata of a tensor from every rank's own shards: checked on each rank, sent to all, merged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from shardwise.comm.group import locate
from shardwise.errors import LayoutError, PropertyError, RankMismatchError
from shardwise.layout import Layout, parse_shards
from shardwise.layout.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.layout.placement import Placement, same_device
from shardwise.layout.specs.enumerable import check_tensor, validate_non_overlapping_shards_metadata
from shardwise.tensor.dispatch import Distributed, summary
from shardwise.tensor.shard import Shard


def build_metadata_from_local_shards(
    local_shards: list[Shard], global_size: torch.Size, current_rank: int, pg: ProcessGroup
) -> ShardedTensorMetadata:
    """The metadata of this rank's shards, checked against each other."""
    if not local_shards:
        raise PropertyError("must have local shards!")
    if not all(isinstance(shard, Shard) for shard in local_shards):
        raise PropertyError(f"local_shards must be a list of Shard, found {summary(local_shards)}")
    first = TensorProperties.create_from_tensor(local_shards[0].tensor)
    for shard in local_shards:
        tensor, metadata = shard.tensor, shard.metadata
        place = locate(Placement.of(metadata.placement), pg)
        if isinstance(tensor, Distributed) or tensor.is_quantized:
            raise PropertyError(f"a shard holds a plain tensor, found {summary(tensor)} on rank:{current_rank}")
        if tensor.layout != torch.strided:
            raise PropertyError(
                f"Only torch.strided layout is currently supported, but found {tensor.layout} on rank:{current_rank}!"
            )
        if not tensor.is_contiguous():
            raise PropertyError("Only torch.contiguous_format memory_format is currently supported!")
        if place.rank != current_rank:
            raise PropertyError(
                "Local shard metadata's rank does not match with the rank in its process group! "
                f"Found current rank in the process group: {current_rank}, "
                f"local ShardMetadata placement's rank: {place.rank}"
            )
        if not same_device(tensor.device, place.device):
            raise PropertyError(
                "Local shard tensor device does not match with local Shard's placement! "
                f"Found local shard tensor device: {tensor.device}, placement device: {place.device}"
            )
        same = [
            ("size", metadata.shard_sizes, list(tensor.size())),
            ("pin_memory", tensor.is_pinned(), first.pin_memory),
            ("dtype", tensor.dtype, first.dtype),
            ("requires_grad", tensor.requires_grad, first.requires_grad),
        ]
        for name, one, other in same:
            if one != other:
                raise PropertyError(
                    f"Local shards' tensor {name} property need to be the same on rank:{current_rank}! "
                    f"Found one local shard tensor {name}={one}, the other local shard tensor {name}={other}."
                )
    return ShardedTensorMetadata([shard.metadata for shard in local_shards], global_size, first)


def build_global_metadata(
    gathered_metadatas: Sequence[ShardedTensorMetadata | None], recalc_metadata: bool = False
) -> ShardedTensorMetadata:
    """The metadata of a tensor from every rank's own, None where a rank holds nothing."""
    metadata = merge_metadata(gathered_metadatas, list(range(len(gathered_metadatas))))
    if recalc_metadata:
        infer_size(metadata, [None] * len(metadata.size))
    validate_non_overlapping_shards_metadata(metadata.shards_metadata)
    check_tensor(metadata.shards_metadata, metadata.size)
    return metadata


def merge_metadata(gathered: Sequence[ShardedTensorMetadata | None], ranks: Sequence[int]) -> ShardedTensorMetadata:
    """The metadata with all ranks' shards, if the ranks agree on everything else."""
    holders = [(rank, metadata) for rank, metadata in zip(ranks, gathered, strict=True) if metadata is not None]
    if not holders:
        raise RankMismatchError("ShardedTensor have no local shards on all ranks!")
    first_rank, first = holders[0]
    for rank, metadata in holders:
        if metadata.size == first.size and metadata.tensor_properties == first.tensor_properties:
            continue
        mine = {"global_size": list(first.size), **vars(first.tensor_properties)}
        theirs = {"global_size": list(metadata.size), **vars(metadata.tensor_properties)}
        for name, expected in mine.items():
            if theirs[name] != expected:
                raise RankMismatchError(
                    f"ShardedTensor {name} property does not match from different ranks! "
                    f"{name}={expected} on rank:{first_rank} does not match with {name}={theirs[name]} on rank:{rank}."
                )
    shards = [
        ShardMetadata.trusted(list(shard.shard_offsets), list(shard.shard_sizes), shard.placement)
        for _, metadata in holders
        for shard in metadata.shards_metadata
    ]
    return ShardedTensorMetadata(shards, first.size, first.tensor_properties)


def infer_size(metadata: ShardedTensorMetadata, size: list[int | None]) -> None:
    """Fill in the dims of the size that are None, and with them the offsets, in place.

    The shards are laid along the first such dim: by their offsets, if these fit together, else one after another in
    the given order. Other unknown dims are as large as the shards are there.
    """
    shards = metadata.shards_metadata
    boxes = parse_shards(shards)
    if boxes.ndim != len(size):
        raise LayoutError(f"Rank of tensor is {len(size)}, but shards rank is {boxes.ndim}")
    along = size.index(None)
    holding = boxes.take(boxes.filled) if len(boxes.filled) else boxes  # an empty box may lie beyond the end
    ends = holding.ends.max(axis=0).tolist()
    try:
        metadata.size = torch.Size([ends[dim] if given is None else given for dim, given in enumerate(size)])
        Layout.from_metadata(shards, metadata.size)
    except LayoutError:
        position = 0
        for shard in shards:
            shard.shard_offsets = [position if dim == along else 0 for dim in range(boxes.ndim)]
            position += shard.shard_sizes[along]
        extents = parse_shards(shards).ends.max(axis=0).tolist()
        metadata.size = torch.Size([extents[dim] if given is None else given for dim, given in enumerate(size)])


def metadata_to_json(metadata: ShardedTensorMetadata) -> dict[str, Any]:
    """One rank's metadata, without the size, as JSON values."""
    properties = metadata.tensor_properties
    return {
        "shards": [
            [shard.shard_offsets, shard.shard_sizes, str(shard.placement)] for shard in metadata.shards_metadata
        ],
        "dtype": str(properties.dtype).removeprefix("torch."),
        "requires_grad": properties.requires_grad,
        "pin_memory": properties.pin_memory,
    }


def metadata_from_json(record: dict[str, Any]) -> ShardedTensorMetadata:
    """The metadata that `metadata_to_json` wrote."""
    properties = TensorProperties(
        getattr(torch, record["dtype"]),
        requires_grad=record["requires_grad"],
        pin_memory=record["pin_memory"],
    )
    return ShardedTensorMetadata([ShardMetadata(*shard) for shard in record["shards"]], torch.Size([]), properties)
