"""Files, or stretches of them, as bytes that are parsed: never more than there are, or than anybody would write."""

from __future__ import annotations

from shardwise.errors import CheckpointError
from shardwise.storage import OpenFile, Storage

MOST_METADATA = 2**31  # bytes of a file that is parsed as a whole


def part(file: OpenFile, begin: int, length: int) -> bytes:
    """A stretch of a file, or the error that says that it is not that long."""
    if begin < 0 or length < 0 or begin + length > file.size:
        raise CheckpointError(f"bytes {begin:,} to {begin + length:,} are beyond the end of the file, at {file.size:,}")
    buffer = bytearray(length)
    if length:
        file.read(begin, [memoryview(buffer)])
    return bytes(buffer)


def content(storage: Storage, name: str, *, most: int = MOST_METADATA) -> bytes:
    """A file as a whole."""
    file = storage.open(name)
    try:
        if file.size > most:
            raise CheckpointError(
                f"'{name}' of '{storage}' has {file.size:,} bytes, of which at most {most:,} are read"
            )
        return part(file, 0, file.size)
    finally:
        file.close()
