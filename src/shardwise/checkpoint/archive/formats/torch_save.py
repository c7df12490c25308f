"""The format of `torch.save`: as a file, as a range of bytes within another file, or as a folder of such files, which
Hugging Face's libraries used to write. No code in a file is run."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Collection
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.archive.formats.assembly import parse_counts, read_weight_map, require_plain_values
from shardwise.checkpoint.archive.formats.nested import TensorNames, with_stored_tensors
from shardwise.checkpoint.archive.formats.safe_pickle import GlobalName, PersistentId, PickledCall, read_pickle
from shardwise.checkpoint.archive.formats.zip_directory import ZipDirectory
from shardwise.checkpoint.archive.stored import DTYPES, Index
from shardwise.checkpoint.storage.local import LocalStorage
from shardwise.checkpoint.storage.protocol import OpenFile, Storage, read_file, read_range
from shardwise.errors import CheckpointError

PICKLE = "data.pkl"
SIZE = GlobalName("torch", "Size")
DTYPE_NAMES = {GlobalName("torch", name): dtype for name, dtype in DTYPES.items()}
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
_STORAGE_NAMES = {GlobalName("torch", f"{word}Storage"): DTYPES[dtype] for word, dtype in _STORAGES.items()}
_UNTYPED = (GlobalName("torch.storage", "UntypedStorage"), GlobalName("torch", "UntypedStorage"))
_TYPED, _DTYPED = GlobalName("torch._utils", "_rebuild_tensor_v2"), GlobalName("torch._utils", "_rebuild_tensor_v3")
_HOOKS = GlobalName("collections", "OrderedDict")
_KNOWN = frozenset({*DTYPE_NAMES, *_STORAGE_NAMES, *_UNTYPED, _TYPED, _DTYPED, _HOOKS, SIZE})


class SavedTensor(NamedTuple):
    """A tensor whose bytes lie in row-major order from byte ``begin`` of the file."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    begin: int


def find_tensor(file: OpenFile, begin: int, length: int, what: str) -> SavedTensor | torch.Tensor:
    """Where the tensor saved as these bytes lies; the tensor itself where its elements are in another order.

    Of a plain tensor, only the zip directory is read. Any other value is read as a whole, and must be a tensor.
    """
    directory = ZipDirectory.at(file, begin, length, what)
    if directory is not None:
        prefix = archive_prefix(directory)
        words = _parse_tensor_pickle(directory.content(prefix + PICKLE))
        place = None if words is None else _place(words, directory, prefix)
        if place is not None:
            return place
    value = load_weights(read_range(file, begin, length), what)
    if not isinstance(value, torch.Tensor):
        raise CheckpointError(f"{what} should be a tensor, and is a {type(value).__name__}")
    tensor = require_plain_values(what, value)
    if tensor.untyped_storage().nbytes() > length:
        raise CheckpointError(f"{what} is damaged: its tensor is larger than its data")
    return tensor


def load_value(file: OpenFile, begin: int, length: int, what: str) -> Any:
    """The value saved as these bytes."""
    directory = ZipDirectory.at(file, begin, length, what)
    if directory is not None:
        value = read_pickle(directory.content(archive_prefix(directory) + PICKLE), (), what, otherwise=...)
        if value is not ...:
            return value  # else torch reads it: it contains tensors or other known types
    return load_weights(read_range(file, begin, length), what)


def load_weights(source: bytes | str, what: str, *, mmap: bool = False) -> Any:
    """The value in these bytes, or in a file, by `torch.load` with ``weights_only``."""
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


def archive_prefix(directory: ZipDirectory) -> str:
    """The folder within the zip archive that holds all entries of torch.save."""
    found = [name for name in directory.items if name.count("/") == 1 and name.endswith("/" + PICKLE)]
    if len(found) != 1:
        raise CheckpointError(f"{directory.what} was not written by torch.save")
    return found[0].removesuffix(PICKLE)


def parse_sizes(value: Any, what: str) -> tuple[int, ...]:
    """Sizes, from a tuple or a pickled `torch.Size`."""
    if isinstance(value, PickledCall) and value.kind == SIZE and len(value.args) == 1 and value.state is None:
        value = value.args[0]
    return parse_counts(value, what)


class _TensorPickle(NamedTuple):
    """A parsed pickle of a tensor: the key of the entry with its data, and its first element there."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    key: str
    first: int


@lru_cache(maxsize=4096)  # many chunks have the same size, and the same pickle
def _parse_tensor_pickle(data: bytes) -> _TensorPickle | None:
    """The tensor that a pickle describes; None unless it is a plain one in row-major order."""
    made = read_pickle(data, _KNOWN, "a tensor", otherwise=None)
    if not isinstance(made, PickledCall) or made.state is not None or made.kind not in (_TYPED, _DTYPED):
        return None
    typed = made.kind == _TYPED
    if len(made.args) != (6 if typed else 7) or not isinstance(made.args[0], PersistentId):
        return None
    reference, first, size, stride = made.args[:4]
    key = reference.key
    if type(key) is not tuple or len(key) != 5 or not isinstance(key[1], GlobalName) or not isinstance(key[2], str):
        return None
    kind = key[1] if typed else made.args[6]
    dtype = (_STORAGE_NAMES if typed else DTYPE_NAMES).get(kind) if isinstance(kind, GlobalName) else None
    if dtype is None or (not typed and key[1] not in _UNTYPED) or type(first) is not int or first < 0:
        return None
    sizes, strides = parse_sizes(size, "a size"), parse_sizes(stride, "a stride")
    return _TensorPickle(dtype, sizes, key[2], first) if _is_row_major(sizes, strides) else None


def _place(words: _TensorPickle, directory: ZipDirectory, prefix: str) -> SavedTensor | None:
    """Where the tensor lies; None where its bytes are big-endian."""
    if f"{prefix}byteorder" in directory.items and directory.content(f"{prefix}byteorder") != b"little":
        return None
    data = f"{prefix}data/{words.key}"
    if (words.first + math.prod(words.sizes)) * words.dtype.itemsize > directory.size(data):
        raise CheckpointError(f"{directory.what} is damaged: its tensor is larger than its data")
    return SavedTensor(words.dtype, words.sizes, directory.position(data) + words.first * words.dtype.itemsize)


def _is_row_major(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if len(sizes) != len(strides):
        return False
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


FORMAT = "torch.save"
ONE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
MOST_BYTES = 2**40  # of a file that is read into memory because it cannot be mapped


def is_torch_file(file: OpenFile) -> bool:
    """Whether a file begins as those of `torch.save` do: as a zip archive, or in the old format as a pickle."""
    return file.size >= 4 and (read_range(file, 0, 4) == b"PK\3\4" or read_range(file, 0, 2) == b"\x80\x02")


def is_here(names: Collection[str]) -> bool:
    """Whether a folder with these files holds weights of Hugging Face in the format of `torch.save`."""
    return ONE in names or INDEX in names


def build_folder_index(storage: Storage) -> Index:
    """The index of a folder of Hugging Face: of the files in its own index, else of `pytorch_model.bin`."""
    if INDEX not in storage.names():
        return build_index(storage, ONE)
    weight_map = read_weight_map(storage, INDEX)
    parts = [build_index(storage, name) for name in sorted(set(weight_map.values()))]
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    for name, file in weight_map.items():
        if name not in tensors:
            raise CheckpointError(
                f"'{storage}' is damaged: '{INDEX}' says that '{name:.200}' is in '{file}'; it is not"
            )
    index = hashlib.blake2b("".join(part.id for part in parts).encode(), digest_size=8).hexdigest()
    sizes = {name: size for part in parts for name, size in part.files.items()}
    return Index(index, sizes, tensors, dict(tensors), FORMAT)


def build_index(storage: Storage, name: str) -> Index:
    """The index of a file. Tensors of a local zip file are memory-mapped; other files are read whole."""
    file = storage.open(name)
    try:
        size, begin = file.size, read_range(file, 0, min(file.size, 2**16))
        if not is_torch_file(file):
            raise CheckpointError(f"'{name}' of '{storage}' was not written by torch.save")
    finally:
        file.close()
    what = f"'{name}' of '{storage}'"
    if isinstance(storage, LocalStorage) and begin.startswith(b"PK"):
        value = load_weights(str(storage.path / name), what, mmap=True)
    else:
        value = load_weights(read_file(storage, name, most=MOST_BYTES), what)
    names = TensorNames()
    state = with_stored_tensors(value, (), names, nbytes=size)
    index = hashlib.blake2b(begin + size.to_bytes(8, "little"), digest_size=8).hexdigest()
    return Index(index, {name: size}, names.tensors, state, FORMAT)
