"""`ZipDirectory`: where the entries of a zip archive lie, which may be a range of bytes in a file."""

from __future__ import annotations

import struct
from typing import NamedTuple

from shardwise.checkpoint.storage.protocol import OpenFile, read_range
from shardwise.errors import CheckpointError

_ENTRY = struct.Struct("<4s6H3I5H2I")  # an entry of the directory
_LOCAL = struct.Struct("<4s5H3I2H")  # the header before an entry's content
_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
_MANY = 0xFFFFFFFF  # placeholder for a 64-bit number, which is in the extra field
MOST_DIRECTORY = 2**28
WINDOW = 2048  # bytes read at once at either end: enough for an archive of one tensor


class Item(NamedTuple):
    """An entry: the position of its header, and its size in bytes."""

    header: int
    size: int
    is_plain: bool  # neither compressed nor encrypted


class ZipDirectory:
    """The directory of a zip archive in a range of bytes of a file. Positions are those within the file."""

    def __init__(self, file: OpenFile, begin: int, length: int, what: str) -> None:
        self.what = what
        self._file, self._begin, self._length = file, begin, length
        if begin < 0 or length < _END.size or begin + length > file.size:
            raise CheckpointError(
                f"{what} should be bytes {begin:,} to {begin + length:,} of a file that has {file.size:,}"
            )
        if length <= 2 * WINDOW:
            self._windows = [(0, read_range(file, begin, length))]
        else:
            tail = length - WINDOW
            self._windows = [(0, read_range(file, begin, WINDOW)), (tail, read_range(file, begin + tail, WINDOW))]
        self.items: dict[str, Item] = {}

    @staticmethod
    def at(file: OpenFile, begin: int, length: int, what: str) -> ZipDirectory | None:
        """The directory of these bytes; None if they are no zip archive."""
        found = ZipDirectory(file, begin, length, what)
        if not found._windows[0][1].startswith(b"PK\3\4"):
            return None
        try:
            found.items = found._parsed()
        except (struct.error, ValueError) as error:
            raise CheckpointError(f"{what} is damaged: it is no whole zip archive ({error})") from error
        return found

    def content(self, name: str) -> bytes:
        """The content of an entry."""
        item = self._item(name)
        if item.size > MOST_DIRECTORY:
            raise CheckpointError(f"'{name}' of {self.what} has {item.size:,} bytes, which are too many")
        return self._part(self.position(name) - self._begin, item.size)

    def position(self, name: str) -> int:
        """The byte of the file at which the content of an entry begins."""
        item = self._item(name)
        try:
            local = _LOCAL.unpack(self._part(item.header, _LOCAL.size))
        except struct.error as error:
            raise CheckpointError(f"{self.what} is damaged: {error}") from error
        begin = item.header + _LOCAL.size + int(local[9]) + int(local[10])
        if local[0] != b"PK\3\4" or not item.is_plain or begin + item.size > self._length:
            raise CheckpointError(f"{self.what} is damaged: '{name}' is not where its directory says, or compressed")
        return self._begin + begin

    def size(self, name: str) -> int:
        """The bytes of an entry."""
        return self._item(name).size

    def _item(self, name: str) -> Item:
        if name not in self.items:
            raise CheckpointError(f"{self.what} is damaged: it has no '{name:.100}'")
        return self.items[name]

    def _part(self, begin: int, length: int) -> bytes:
        if begin < 0 or length < 0 or begin + length > self._length:
            raise CheckpointError(f"{self.what} is damaged: some of it should lie beyond its end")
        for start, window in self._windows:
            if start <= begin and begin + length <= start + len(window):
                return window[begin - start : begin - start + length]
        return read_range(self._file, self._begin + begin, length)

    def _parsed(self) -> dict[str, Item]:
        end = self._length - _END.size
        mark, _, _, _, count, size, offset, _ = _END.unpack(self._part(end, _END.size))
        if mark != b"PK\5\6":
            raise ValueError("its end is not there")
        if end >= _LOCATOR_64.size:
            locator = _LOCATOR_64.unpack(self._part(end - _LOCATOR_64.size, _LOCATOR_64.size))
            if locator[0] == b"PK\6\7":
                found = _END_64.unpack(self._part(locator[2], _END_64.size))
                if found[0] != b"PK\6\6":
                    raise ValueError("its end is not there")
                count, size, offset = found[7:]
        if size > MOST_DIRECTORY:
            raise ValueError("its directory is too large")
        directory = self._part(offset, size)
        items: dict[str, Item] = {}
        at = 0
        for _ in range(count):
            fields = _ENTRY.unpack_from(directory, at)
            if fields[0] != b"PK\1\2":
                raise ValueError("its directory is damaged")
            packed, full, name, extra, comment = fields[8:13]
            begin = at + _ENTRY.size
            wide = _wide(directory[begin + name : begin + name + extra], full, packed, fields[16])
            key = directory[begin : begin + name].decode()
            if key in items:
                raise ValueError("two of its entries have one name")
            items[key] = Item(wide[2], wide[0], not fields[3] & 1 and fields[4] == 0 and wide[0] == wide[1])
            at = begin + name + extra + comment
        return items


def _wide(extra: bytes, *numbers: int) -> list[int]:
    """The numbers, with 64-bit ones taken from the extra field."""
    found, at = list(numbers), 0
    if _MANY not in found:
        return found
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            return [next(wide, _MANY) if number == _MANY else number for number in found]
        at += 4 + length
    return found
