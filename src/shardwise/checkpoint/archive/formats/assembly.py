"""From the chunks and file names in a foreign index to a `StoredTensor`. Every number and name is checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.archive.stored import DTYPES, FileLocation, StoredTensor, whole_on_rank
from shardwise.checkpoint.storage.protocol import OpenFile, Storage, read_file
from shardwise.errors import CheckpointError, LayoutError
from shardwise.layout import Layout
from shardwise.layout.geometry import Boxes
from shardwise.layout.placement import Placement

MOST_OPEN = 64  # files at a time


class NumberedFiles:
    """The files of an archive while its index is built. Each gets a number, which layouts use, and is opened once."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.sizes: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._open: dict[str, OpenFile] = {}

    def __enter__(self) -> NumberedFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open.values():
            file.close()

    def opened(self, name: str) -> OpenFile:
        """An open file."""
        found = self._open.pop(name, None)
        if found is None:
            found = self.storage.open(require_file_name(name))
            while len(self._open) >= MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._numbers.setdefault(name, len(self._numbers))
            self.sizes.setdefault(name, found.size)
        self._open[name] = found  # at the end: the first one is closed first
        return found

    def number(self, name: str) -> int:
        """The number of a file in the index."""
        if name not in self._numbers:
            self.opened(name)
        return self._numbers[name]

    def size(self, name: str) -> int:
        """The bytes of a file."""
        if name not in self.sizes:
            self.opened(name)
        return self.sizes[name]


def require_file_name(name: object) -> str:
    """The name of a file within a folder; raises where the name leads out of the folder."""
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{_shown(name)} is no name of a file")
    if "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise CheckpointError(f"{_shown(name)} is no name of a file within the folder")
    return name


def parse_json(text: bytes, what: str) -> dict[str, Any]:
    """The dict that a text is as JSON."""
    try:
        words = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is damaged: it is not JSON ({error})") from error
    if not isinstance(words, dict):
        raise CheckpointError(f"{what} is damaged: it is not a dict")
    return words


def read_weight_map(storage: Storage, index: str) -> Mapping[str, str]:
    """The file of each tensor, from the index of a folder of Hugging Face."""
    what = f"'{index}' of '{storage}'"
    weight_map = parse_json(read_file(storage, index, most=2**30), what).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{what} is damaged: it has no weight_map")
    for name in weight_map.values():
        if "/" in require_file_name(name):
            raise CheckpointError(f"{what} names '{name:.100}', which is no file of the folder")
    return weight_map


def _shown(name: object) -> str:
    return f"{name!r:.100}" if isinstance(name, str) else f"a {type(name).__name__}"


MOST_DIMS = 64
MOST_BYTES = 2**62  # of a tensor
_KNOWN = frozenset(DTYPES.values())


class Chunk(NamedTuple):
    """A box of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    location: FileLocation | torch.Tensor


def parse_counts(value: Any, what: str) -> tuple[int, ...]:
    """Offsets or sizes: a list of at most `MOST_DIMS` numbers, none negative."""
    if not isinstance(value, list | tuple) or len(value) > MOST_DIMS:
        raise CheckpointError(f"{what} should be a row of at most {MOST_DIMS} numbers")
    if not all(type(number) is int and 0 <= number < 2**63 for number in value):
        raise CheckpointError(f"{what} should be numbers from 0 to 2^63")
    return tuple(value)


def require_size(name: str, dtype: torch.dtype, size: Sequence[int]) -> torch.Size:
    """The size of a tensor; raises where no memory could hold it."""
    if math.prod(number or 1 for number in size) * dtype.itemsize > MOST_BYTES:
        raise CheckpointError(f"tensor '{name:.200}' of size {list(size)} is beyond all memory")
    return torch.Size(size)


def assemble_tensor(
    name: str, dtype: torch.dtype, size: Sequence[int], chunks: Sequence[Chunk], files: NumberedFiles
) -> StoredTensor:
    """The tensor that these chunks make up. Of several chunks with the same box, the first one counts."""
    whole = require_size(name, dtype, size)
    if not math.prod(whole):
        return StoredTensor(name, dtype, whole, whole_on_rank(whole, 0), (torch.empty(whole, dtype=dtype),))
    kept: dict[tuple[tuple[int, ...], tuple[int, ...]], FileLocation | torch.Tensor] = {}
    for chunk in chunks:
        if all(chunk.sizes):
            kept.setdefault((chunk.offsets, chunk.sizes), chunk.location)
    locations = tuple(kept.values())
    places = [files.number(location.file) if isinstance(location, FileLocation) else 0 for location in locations]
    try:
        if len(kept) == 1 and next(iter(kept)) == ((0,) * len(whole), tuple(whole)):  # the common case
            layout = whole_on_rank(whole, places[0])
        else:
            boxes = Boxes.parse([offsets for offsets, _ in kept], [sizes for _, sizes in kept], len(whole))
            numbers = {number: Placement(torch.device("cpu"), number) for number in set(places)}
            named = [numbers[number] for number in places]
            layout = Layout.checked(whole, boxes, named, lambda row: f"{row} {boxes.describe(row)}")
    except LayoutError as error:
        raise CheckpointError(f"the chunks of tensor '{name:.200}' do not make it up: {error}") from error
    for (_, sizes), location in kept.items():
        _require_there(name, dtype, sizes, location, files)
    return StoredTensor(name, dtype, whole, layout, locations)


def _require_there(
    name: str, dtype: torch.dtype, sizes: tuple[int, ...], location: FileLocation | torch.Tensor, files: NumberedFiles
) -> None:
    if isinstance(location, torch.Tensor):
        if location.dtype != dtype or tuple(location.shape) != sizes:
            raise CheckpointError(
                f"a chunk of tensor '{name:.200}' should be {dtype} of size {list(sizes)}; found {location.dtype} "
                f"of size {list(location.shape)}"
            )
        return
    end = location.begin + math.prod(sizes) * dtype.itemsize
    if location.begin < 0 or end > files.size(location.file):
        raise CheckpointError(
            f"bytes {location.begin:,} to {end:,} of file '{location.file}', where a chunk of tensor '{name:.200}' "
            f"should be, are beyond its end at {files.size(location.file):,}: it was cut short, or its index is damaged"
        )


def stored_in_memory(name: str, tensor: torch.Tensor) -> StoredTensor:
    """The `StoredTensor` of a tensor in memory."""
    plain = require_plain_values(f"tensor '{name:.200}'", tensor)
    return StoredTensor(name, plain.dtype, plain.shape, whole_on_rank(plain.shape, 0), (plain,))


def require_plain_values(what: str, tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor that was read; raises for subclasses, other layouts and other devices."""
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
