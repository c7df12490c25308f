"""`Archive`: an open checkpoint of any format. Reads see the checkpoint as it was when it was opened."""

from __future__ import annotations

import resource
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import torch

from shardwise.checkpoint.archive.index_file import box_key
from shardwise.checkpoint.archive.reading import LocatedSlab, read_slabs
from shardwise.checkpoint.archive.slabs import Slab, slabs_of
from shardwise.checkpoint.archive.stored import FileLocation, Index, StoredTensor
from shardwise.checkpoint.archive.tensor_file import Header, TensorEntry, read_own_header
from shardwise.checkpoint.storage import OpenFile, Storage
from shardwise.comm.transfer.views import view_of
from shardwise.errors import DamageError
from shardwise.layout.geometry import Boxes, describe

MOST_OPEN = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 256)  # files; no limit is -1


class Archive:
    """The index of a checkpoint and its files, opened on demand. A context that closes the files."""

    def __init__(self, storage: Storage, index: Index, *, on_read: Callable[[int], object] = lambda _: None) -> None:
        self.storage, self.index = storage, index
        self.on_read = on_read  # called with the number of bytes that were read
        self._open: OrderedDict[str, OpenFile] = OrderedDict()
        self._headers: dict[str, Header] = {}

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._open.popitem()[1].close()

    def file(self, name: str) -> OpenFile:
        """A file, open, of the size in the index. The least recently used files are closed when many are open."""
        found = self._open.get(name)
        if found is None:
            while len(self._open) >= MOST_OPEN:
                self._open.popitem(last=False)[1].close()
            found = self.storage.open(name)
            try:
                _require_size(self.storage, name, found.size, self.index.files[name])
            except BaseException:
                found.close()
                raise
            self._open[name] = found
        self._open.move_to_end(name)
        return found

    def file_of(self, stored: StoredTensor, row: int) -> str | None:
        """The name of the file that holds a box of a tensor; None if the box is in memory."""
        if stored.locations is None:
            return self.index.names[int(stored.layout.ranks[row])]
        location = stored.locations[row]
        return location.file if isinstance(location, FileLocation) else None

    def locate(self, stored: StoredTensor, row: int) -> FileLocation | torch.Tensor:
        """Where a box of a tensor lies. Checks everything about its file but the bytes of tensors."""
        if stored.locations is not None:
            location = stored.locations[row]
            if isinstance(location, FileLocation):
                self.file(location.file)
            return location
        (offsets, sizes), name = stored.box(row), self.index.names[int(stored.layout.ranks[row])]
        try:
            header = self.header(name)
            key = box_key(stored.name, stored.size, offsets, sizes)
            position = header.position(key, TensorEntry(stored.dtype, tuple(sizes)))
            return FileLocation(name, position, header.sums(key))
        except DamageError as error:
            what = f"{describe(offsets, sizes)} of tensor '{stored.name}'"
            reason = str(error).removeprefix(f"'{self.storage}' is damaged: ")
            raise DamageError(f"'{self.storage}' is damaged, {what} cannot be read: {reason}") from error

    def header(self, name: str) -> Header:
        """The header of a file in shardwise's own format."""
        found = self._headers.get(name)
        if found is None:
            assert self.index.sums is not None
            found = read_own_header(self.file(name), name, self.index.id, self.index.sums[name])
            self._headers[name] = found
        return found

    def fill(self, slabs: Iterable[Slab], *, verify: bool = True) -> None:
        """Read slabs into their tensors."""
        self.fill_located(self.locate_all(slabs), verify=verify)

    def locate_all(self, slabs: Iterable[Slab]) -> list[LocatedSlab | tuple[Slab, torch.Tensor]]:
        """The slabs with the locations of their boxes. Opens and checks the files."""
        found: list[LocatedSlab | tuple[Slab, torch.Tensor]] = []
        for slab in slabs:
            location = self.locate(slab.stored, slab.row)
            found.append(LocatedSlab(slab, location) if isinstance(location, FileLocation) else (slab, location))
        return found

    def fill_located(self, located: Sequence[LocatedSlab | tuple[Slab, torch.Tensor]], *, verify: bool = True) -> None:
        """Read slabs whose locations are known."""
        by_file: dict[str, list[LocatedSlab]] = {}
        with torch.inference_mode():  # allows writing into inference tensors
            for one in located:
                if isinstance(one, LocatedSlab):
                    location = one.location if verify else one.location._replace(sums=None)
                    by_file.setdefault(location.file, []).append(LocatedSlab(one.slab, location))
                    continue
                slab, memory = one
                source = view_of(memory, slab.offsets, slab.sizes)
                view_of(slab.target, slab.target_offsets, slab.sizes).copy_(source)
                self.on_read(source.nbytes)
            for name, found in by_file.items():
                read_slabs(self.file(name), found, str(self.storage), self.on_read)

    def read_box(
        self, stored: StoredTensor, offsets: Sequence[int], sizes: Sequence[int], *, verify: bool = True
    ) -> torch.Tensor:
        """A box of a tensor, on the CPU."""
        made = torch.empty(tuple(sizes), dtype=stored.dtype)
        boxes = Boxes.parse([list(offsets)], [list(sizes)], len(stored.size))
        self.fill(slabs_of(stored, boxes, [made]), verify=verify)
        return made

    def read(self, stored: StoredTensor, *, verify: bool = True) -> torch.Tensor:
        """All of a tensor."""
        return self.read_box(stored, [0] * len(stored.size), stored.size, verify=verify)


def _require_size(storage: Storage, name: str, found: int, written: int) -> None:
    if found != written:
        cut = "cut off or " if found < written else ""
        raise DamageError(
            f"'{storage}' is damaged: its file '{name}' is {cut}changed, it has {found:,} bytes and was written with "
            f"{written:,}. Copy it again, or take another checkpoint"
        )
