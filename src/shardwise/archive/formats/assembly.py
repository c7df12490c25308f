"""From chunks that a foreign file speaks of to a `StoredTensor`, whatever the file says: each number is checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from shardwise.archive.dtypes import DTYPES
from shardwise.archive.formats.files import Files
from shardwise.archive.stored import Spot, StoredTensor, in_one
from shardwise.errors import CheckpointError, LayoutError
from shardwise.geometry import Boxes
from shardwise.layout import Layout
from shardwise.placement import Placement

MOST_DIMS = 64
MOST_BYTES = 2**62  # of a tensor
_KNOWN = frozenset(DTYPES.values())


class Chunk(NamedTuple):
    """A box of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    spot: Spot | torch.Tensor


def counts(value: Any, what: str) -> tuple[int, ...]:
    """Offsets or sizes: a row of a few numbers, none negative."""
    if not isinstance(value, list | tuple) or len(value) > MOST_DIMS:
        raise CheckpointError(f"{what} should be a row of at most {MOST_DIMS} numbers")
    if not all(type(number) is int and 0 <= number < 2**63 for number in value):
        raise CheckpointError(f"{what} should be numbers from 0 to 2^63")
    return tuple(value)


def require_size(name: str, dtype: torch.dtype, size: Sequence[int]) -> torch.Size:
    """The size of a tensor that could be somewhere."""
    if math.prod(number or 1 for number in size) * dtype.itemsize > MOST_BYTES:
        raise CheckpointError(f"tensor '{name:.200}' of size {list(size)} is beyond all memory")
    return torch.Size(size)


def assembled(
    name: str, dtype: torch.dtype, size: Sequence[int], chunks: Sequence[Chunk], files: Files
) -> StoredTensor:
    """The tensor that these chunks make up; of chunks that are the same box, the first counts."""
    whole = require_size(name, dtype, size)
    if not math.prod(whole):
        return StoredTensor(name, dtype, whole, in_one(whole, 0), (torch.empty(whole, dtype=dtype),))
    kept: dict[tuple[tuple[int, ...], tuple[int, ...]], Spot | torch.Tensor] = {}
    for chunk in chunks:
        if all(chunk.sizes):
            kept.setdefault((chunk.offsets, chunk.sizes), chunk.spot)
    spots = tuple(kept.values())
    places = [files.number(spot.file) if isinstance(spot, Spot) else 0 for spot in spots]
    try:
        if len(kept) == 1 and next(iter(kept)) == ((0,) * len(whole), tuple(whole)):  # most often
            layout = in_one(whole, places[0])
        else:
            boxes = Boxes.parse([offsets for offsets, _ in kept], [sizes for _, sizes in kept], len(whole))
            numbers = {number: Placement(torch.device("cpu"), number) for number in set(places)}
            named = [numbers[number] for number in places]
            layout = Layout.checked(whole, boxes, named, lambda row: f"{row} {boxes.describe(row)}")
    except LayoutError as error:
        raise CheckpointError(f"the chunks of tensor '{name:.200}' do not make it up: {error}") from error
    for (_, sizes), spot in kept.items():
        _require_there(name, dtype, sizes, spot, files)
    return StoredTensor(name, dtype, whole, layout, spots)


def _require_there(
    name: str, dtype: torch.dtype, sizes: tuple[int, ...], spot: Spot | torch.Tensor, files: Files
) -> None:
    if isinstance(spot, torch.Tensor):
        if spot.dtype != dtype or tuple(spot.shape) != sizes:
            raise CheckpointError(
                f"a chunk of tensor '{name:.200}' should be {dtype} of size {list(sizes)}; found {spot.dtype} of size "
                f"{list(spot.shape)}"
            )
        return
    end = spot.begin + math.prod(sizes) * dtype.itemsize
    if spot.begin < 0 or end > files.size(spot.file):
        raise CheckpointError(
            f"bytes {spot.begin:,} to {end:,} of file '{spot.file}', where a chunk of tensor '{name:.200}' should be, "
            f"are beyond its end at {files.size(spot.file):,}: it was cut short, or its index is damaged"
        )


def in_memory(name: str, tensor: torch.Tensor) -> StoredTensor:
    """A tensor that was read already."""
    plain = plain_tensor(f"tensor '{name:.200}'", tensor)
    return StoredTensor(name, plain.dtype, plain.shape, in_one(plain.shape, 0), (plain,))


def plain_tensor(what: str, tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor that was read, or the error that says that it is of a kind that cannot be kept."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise CheckpointError(
            f"{what} is a {type(tensor).__name__}, of which the file has one rank's part: save it with shardwise.save, "
            "by torch.distributed.checkpoint, or as a plain tensor"
        )
    if tensor.dtype not in _KNOWN or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise CheckpointError(
            f"{what} is {tensor.layout}, {tensor.dtype}, on {tensor.device}; only plain tensors with data can be read"
        )
    return tensor.detach().resolve_conj().resolve_neg()
