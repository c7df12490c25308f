"""`Archive`: a checkpoint that is open, whatever its format. What is read is what was there when it was opened."""

from __future__ import annotations

import resource
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import torch

from shardwise.archive.index_file import key_of
from shardwise.archive.reading import Located, read_slabs
from shardwise.archive.slabs import Slab, slabs_of
from shardwise.archive.stored import Index, Spot, StoredTensor
from shardwise.archive.tensor_file import Entry, Header, read_own_header
from shardwise.errors import DamageError
from shardwise.geometry import Boxes, describe
from shardwise.storage import OpenFile, Storage
from shardwise.transfer.views import view_of

MOST_OPEN = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 256)  # files; no limit is -1


class Archive:
    """The index of a checkpoint, and its files as they are opened. A context that closes them."""

    def __init__(self, storage: Storage, index: Index, *, told: Callable[[int], object] = lambda _: None) -> None:
        self.storage, self.index = storage, index
        self.told = told  # called with the number of bytes that were read
        self._open: OrderedDict[str, OpenFile] = OrderedDict()
        self._headers: dict[str, Header] = {}

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all files."""
        while self._open:
            self._open.popitem()[1].close()

    def file(self, name: str) -> OpenFile:
        """A file, of the size that it was written with. Of very many, those that were not asked for are closed again:
        names are never given twice, so what is opened later is the same."""
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

    def spot(self, stored: StoredTensor, row: int) -> Spot | torch.Tensor:
        """Where a box of a tensor is; all that can be wrong with its file but the bytes of tensors is found here."""
        if stored.spots is not None:
            spot = stored.spots[row]
            if isinstance(spot, Spot):
                self.file(spot.file)
            return spot
        (offsets, sizes), name = stored.box(row), self.index.names[int(stored.layout.ranks[row])]
        try:
            header = self.header(name)
            key = key_of(stored.name, stored.size, offsets, sizes)
            position = header.position(key, Entry(stored.dtype, tuple(sizes)))
            return Spot(name, position, header.sums(key))
        except DamageError as error:
            what = f"{describe(offsets, sizes)} of tensor '{stored.name}'"
            raise DamageError(f"'{self.storage}' is damaged, {what} cannot be read: {error}") from error

    def header(self, name: str) -> Header:
        """The header of a file of ours."""
        found = self._headers.get(name)
        if found is None:
            assert self.index.sums is not None
            found = read_own_header(self.file(name), name, self.index.id, self.index.sums[name])
            self._headers[name] = found
        return found

    def fill(self, slabs: Iterable[Slab], *, verify: bool = True) -> None:
        """Read slabs into their tensors."""
        self.fill_located(self.located(slabs), verify=verify)

    def located(self, slabs: Iterable[Slab]) -> list[Located | tuple[Slab, torch.Tensor]]:
        """The slabs with the places of their boxes, whose files are then open."""
        found: list[Located | tuple[Slab, torch.Tensor]] = []
        for slab in slabs:
            spot = self.spot(slab.stored, slab.row)
            found.append(Located(slab, spot) if isinstance(spot, Spot) else (slab, spot))
        return found

    def fill_located(self, located: Sequence[Located | tuple[Slab, torch.Tensor]], *, verify: bool = True) -> None:
        """The same for slabs whose places are known."""
        by_file: dict[str, list[Located]] = {}
        with torch.inference_mode():  # in which inference tensors can be written into, too
            for one in located:
                if isinstance(one, Located):
                    spot = one.spot if verify else one.spot._replace(sums=None)
                    by_file.setdefault(spot.file, []).append(Located(one.slab, spot))
                    continue
                slab, memory = one
                source = view_of(memory, slab.offsets, slab.sizes)
                view_of(slab.target, slab.target_offsets, slab.sizes).copy_(source)
                self.told(source.nbytes)
            for name, found in by_file.items():
                read_slabs(self.file(name), found, str(self.storage), self.told)

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
