"""Plain files of `torch.save`, read without running any code that they name."""

from __future__ import annotations

import hashlib

from shardwise.archive.formats.nested import Names, with_stored
from shardwise.archive.formats.torch_blob import load_weights
from shardwise.archive.stored import Index
from shardwise.archive.whole_bytes import content, part
from shardwise.errors import CheckpointError
from shardwise.storage.local import LocalStorage
from shardwise.storage.place import OpenFile, Storage

FORMAT = "torch.save"
MOST_BYTES = 2**40  # that are read into memory, where a file cannot be mapped


def is_one(file: OpenFile) -> bool:
    """Whether a file begins as `torch.save` writes it: as a zip archive, or in the old way as a pickle."""
    return file.size >= 4 and (part(file, 0, 4) == b"PK\3\4" or part(file, 0, 2) == b"\x80\x02")


def read(storage: Storage, name: str) -> Index:
    """What a file holds. Where it is local and not of the old kind, a tensor is read when it is used."""
    file = storage.open(name)
    try:
        size, begin = file.size, part(file, 0, min(file.size, 2**16))
        if not is_one(file):
            raise CheckpointError(f"'{name}' of '{storage}' was not written by torch.save")
    finally:
        file.close()
    what = f"'{name}' of '{storage}'"
    if isinstance(storage, LocalStorage) and begin.startswith(b"PK"):
        value = load_weights(str(storage.path / name), what, mmap=True)
    else:
        value = load_weights(content(storage, name, most=MOST_BYTES), what)
    names = Names()
    state = with_stored(value, (), names, nbytes=size)
    index = hashlib.blake2b(begin + size.to_bytes(8, "little"), digest_size=8).hexdigest()
    return Index(index, {name: size}, names.tensors, state, FORMAT)
