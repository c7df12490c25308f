"""What `torch.save` wrote, as a stretch of a file: where a tensor's bytes are in it, or the value that it is."""

from __future__ import annotations

import io
import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from shardwise.archive.dtypes import DTYPES
from shardwise.archive.formats.assembly import counts, plain_tensor
from shardwise.archive.formats.pickle_machine import Made, Name, Reference, read_pickle
from shardwise.archive.formats.zip_directory import ZipDirectory
from shardwise.archive.whole_bytes import part
from shardwise.errors import CheckpointError
from shardwise.storage.place import OpenFile

PICKLE = "data.pkl"
SIZE = Name("torch", "Size")
DTYPE_NAMES = {Name("torch", name): dtype for name, dtype in DTYPES.items()}
_STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
}
_STORAGE_NAMES = {Name("torch", f"{word}Storage"): DTYPES[dtype] for word, dtype in _STORAGES.items()}
_UNTYPED = (Name("torch.storage", "UntypedStorage"), Name("torch", "UntypedStorage"))
_TYPED, _DTYPED = Name("torch._utils", "_rebuild_tensor_v2"), Name("torch._utils", "_rebuild_tensor_v3")
_HOOKS = Name("collections", "OrderedDict")
_KNOWN = frozenset({*DTYPE_NAMES, *_STORAGE_NAMES, *_UNTYPED, _TYPED, _DTYPED, _HOOKS, SIZE})


class Place(NamedTuple):
    """A tensor whose bytes are in row-major order from this byte of the file on."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    begin: int


def find_tensor(file: OpenFile, begin: int, length: int, what: str) -> Place | torch.Tensor:
    """The place of the tensor that was saved as these bytes; the tensor itself where its elements are in another order.

    Only the directory is read. The value of what is saved in any other way is read as a whole, and must be a tensor.
    """
    directory = ZipDirectory.at(file, begin, length, what)
    if directory is not None:
        prefix = prefix_of(directory)
        words = _tensor_words(directory.content(prefix + PICKLE))
        place = None if words is None else _place(words, directory, prefix)
        if place is not None:
            return place
    value = load_weights(part(file, begin, length), what)
    if not isinstance(value, torch.Tensor):
        raise CheckpointError(f"{what} should be a tensor, and is a {type(value).__name__}")
    tensor = plain_tensor(what, value)
    if tensor.untyped_storage().nbytes() > length:
        raise CheckpointError(f"{what} is damaged: its tensor is larger than its data")
    return tensor


def load_value(file: OpenFile, begin: int, length: int, what: str) -> Any:
    """The value that was saved as these bytes, without running any code."""
    directory = ZipDirectory.at(file, begin, length, what)
    if directory is not None:
        value = read_pickle(directory.content(prefix_of(directory) + PICKLE), (), what, otherwise=...)
        if value is not ...:
            return value  # else it is a tensor, or something else that torch knows
    return load_weights(part(file, begin, length), what)


def load_weights(source: bytes | str, what: str, *, mmap: bool = False) -> Any:
    """What `torch.load` makes of bytes or of a file when it may run no code."""
    try:
        return torch.load(
            source if isinstance(source, str) else io.BytesIO(source), map_location="cpu", weights_only=True, mmap=mmap
        )
    except Exception as error:  # whatever torch finds wrong
        said = " ".join(str(error).rpartition("WeightsUnpickler error:")[2].split())
        raise CheckpointError(
            f"{what} cannot be read without running code that it names, or is damaged; torch.load(weights_only=True) "
            f"says: {type(error).__name__}: {said:.200}"
        ) from error


def prefix_of(directory: ZipDirectory) -> str:
    """The folder in a zip archive that torch put everything into."""
    found = [name for name in directory.items if name.count("/") == 1 and name.endswith("/" + PICKLE)]
    if len(found) != 1:
        raise CheckpointError(f"{directory.what} was not written by torch.save")
    return found[0].removesuffix(PICKLE)


def sizes_of(value: Any, what: str) -> tuple[int, ...]:
    """Sizes as a pickle holds them."""
    if isinstance(value, Made) and value.kind == SIZE and len(value.args) == 1 and value.state is None:
        value = value.args[0]
    return counts(value, what)


class _Words(NamedTuple):
    """What a pickle says of a tensor: the entry with its data, and the first element there."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    key: str
    first: int


@lru_cache(maxsize=4096)  # checkpoints have many chunks of few sizes, and their pickles are the same
def _tensor_words(data: bytes) -> _Words | None:
    """What the pickle of a tensor says; None unless it is a plain one in row-major order."""
    made = read_pickle(data, _KNOWN, "a tensor", otherwise=None)
    if not isinstance(made, Made) or made.state is not None or made.kind not in (_TYPED, _DTYPED):
        return None
    typed = made.kind == _TYPED
    if len(made.args) != (6 if typed else 7) or not isinstance(made.args[0], Reference):
        return None
    reference, first, size, stride = made.args[:4]
    key = reference.key
    if type(key) is not tuple or len(key) != 5 or not isinstance(key[1], Name) or not isinstance(key[2], str):
        return None
    kind = key[1] if typed else made.args[6]
    dtype = (_STORAGE_NAMES if typed else DTYPE_NAMES).get(kind) if isinstance(kind, Name) else None
    if dtype is None or (not typed and key[1] not in _UNTYPED) or type(first) is not int or first < 0:
        return None
    sizes, strides = sizes_of(size, "a size"), sizes_of(stride, "a stride")
    return _Words(dtype, sizes, key[2], first) if _is_row_major(sizes, strides) else None


def _place(words: _Words, directory: ZipDirectory, prefix: str) -> Place | None:
    """Where the tensor is; None where its bytes are in the other order."""
    if f"{prefix}byteorder" in directory.items and directory.content(f"{prefix}byteorder") != b"little":
        return None
    data = f"{prefix}data/{words.key}"
    if (words.first + math.prod(words.sizes)) * words.dtype.itemsize > directory.size(data):
        raise CheckpointError(f"{directory.what} is damaged: its tensor is larger than its data")
    return Place(words.dtype, words.sizes, directory.position(data) + words.first * words.dtype.itemsize)


def _is_row_major(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if len(sizes) != len(strides):
        return False
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
