"""Reading once and sending: where several ranks need the same bytes of a file, one reads them for all.

Every rank decides this alone, and alike, from the layouts. What is read is dealt out to the ranks in whole blocks,
preferably to one that needs them, and the transfer planner says who gets what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from shardwise.checkpoint.archive import Archive, StoredTensor
from shardwise.checkpoint.archive.blocks import Blocks
from shardwise.checkpoint.archive.slabs import Reads, slabs_of
from shardwise.checkpoint.local import Local
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.storage import LocalStorage, Storage
from shardwise.comm.group import Fields, is_fake
from shardwise.comm.transfer import make_plan, move
from shardwise.comm.transfer.views import view_of
from shardwise.layout import Layout, Places
from shardwise.layout.geometry import Boxes

WORTH = 4 * 2**20  # bytes of a tensor: messages for smaller ones take longer than reading them again
PART = 8 * 2**20  # bytes that a rank reads of a stored box at a time
ROUND = 32 * 2**20  # bytes that a rank reads before all send
SAMPLE = 8  # boxes by which the cost is judged, of many


@dataclass(frozen=True)
class ReadCosts:
    """What it costs to read a byte, where sending one costs 1: for the first time on a host, and again.

    What a host has read of a file system it has in its memory, and all its ranks share that; an object store is asked
    each time. So replicas are read by every rank from a disk, and relayed from a store.
    """

    first: float
    again: float
    hosts: int

    @staticmethod
    def of(storage: Storage, hosts: int) -> ReadCosts:
        """The costs of a storage that ranks of so many hosts read."""
        return ReadCosts(2.0, 0.35, hosts) if isinstance(storage, LocalStorage) else ReadCosts(4.0, 4.0, hosts)

    def directly(self, nbytes: float, read: float) -> float:
        """Of reading so many bytes in all where there are so many different ones."""
        first = min(nbytes * self.hosts, read)
        return first * self.first + (read - first) * self.again

    def relayed(self, nbytes: float, sent: float) -> float:
        """Of reading each byte once and sending so many."""
        return nbytes * self.first + sent


def is_relayed(stored: StoredTensor, local: Local, ranks: Ranks, costs: ReadCosts, *, verify: bool) -> bool:
    """Whether a tensor is cheaper to read once and send than to be read by each rank that needs it."""
    if ranks.group is None or len(ranks.all) == 1 or is_fake(ranks.group) or stored.nbytes < WORTH:
        return False
    if any(isinstance(location, torch.Tensor) for location in stored.locations or ()):
        return False  # it is in everybody's memory
    wanted = wanted_by_all(local, ranks)
    rows = wanted.pattern.filled
    if not np.isin(wanted.ranks[rows], ranks.all).all():
        return False  # ranks that do not take part need some of it
    some = rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), SAMPLE)).astype(np.int64))]
    directly = sum(_read_for(stored, wanted.at([row]), verify) for row in some.tolist()) * len(rows) / len(some)
    sent = wanted.elements * stored.dtype.itemsize * (1 - 1 / len(ranks.all))
    return costs.directly(stored.nbytes, directly) > costs.relayed(stored.nbytes, sent)


def wanted_by_all(local: Local, ranks: Ranks) -> Layout:
    """Which rank needs which boxes; of a plain tensor, all of them all."""
    if not local.plain:
        return local.layout
    return Layout.whole(local.layout.size, Places.on_ranks(np.array(ranks.all, dtype=np.int64), "cpu"))


def _read_for(stored: StoredTensor, box: Boxes, verify: bool) -> int:
    """The bytes of a file that are read for a box."""
    itemsize, found = stored.dtype.itemsize, 0
    _, rows = stored.layout.meeting(box)
    there = stored.layout.at(rows)
    low, high = np.maximum(there.offsets, box.offsets), np.minimum(there.ends, box.ends)
    checked = verify and stored.locations is None
    for extent, offsets, sizes in zip(
        there.sizes.tolist(), (low - there.offsets).tolist(), (high - low).tolist(), strict=True
    ):
        if checked:
            found += Blocks.of(extent, itemsize).elements_meeting(offsets, sizes)
        else:
            reads = Reads.of(extent, itemsize, offsets, sizes)
            found += len(reads.starts) * reads.length
    return found * itemsize


@dataclass(frozen=True, eq=False)
class Relay:
    """A tensor that is read once and sent: who needs what, and who reads what, round by round."""

    stored: StoredTensor
    local: Local
    wanted: Layout
    rounds: Sequence[Layout]

    @staticmethod
    def of(archive: Archive, stored: StoredTensor, local: Local, ranks: Ranks) -> Relay:
        """Decided alike on every rank. The files that this rank will read are then open."""
        wanted = wanted_by_all(local, ranks)
        rounds = list(rounds_of(stored, wanted, ranks))
        for read in rounds:
            _, rows = stored.layout.meeting(read.at(read.rows_on(ranks.here)))
            for row in np.unique(rows).tolist():
                archive.locate(stored, row)
        return Relay(stored, local, wanted, rounds)

    @property
    def words(self) -> str:
        """What must be the same on all ranks, for they will send each other its data."""
        where = "plain" if self.local.plain else self.wanted.outline
        return f"'{self.stored.name}', {self.local.dtype}, {where}"

    def fill(self, archive: Archive, ranks: Ranks, *, verify: bool) -> None:
        """Fill what is here of the tensor. Every rank calls it, for the same tensors in the same order."""
        assert ranks.group is not None
        targets, dtype = list(self.local.tensors.values()), self.local.dtype
        for read in self.rounds:
            parts, _ = ranks.in_step(partial(self._read, archive, read.at(read.rows_on(ranks.here)), verify))
            if not self.local.plain:
                move(make_plan(read, self.wanted), parts, ranks.group, dtype=dtype, outs=targets).wait()
                continue
            arrived = move(make_plan(read, _on_all(read, ranks)), parts, ranks.group, dtype=dtype).wait()
            boxes = zip(read.boxes.offsets.tolist(), read.boxes.sizes.tolist(), arrived, strict=True)
            for offsets, sizes, part in boxes:
                view_of(targets[0], offsets, sizes).copy_(part)

    def _read(self, archive: Archive, mine: Boxes, verify: bool) -> tuple[list[torch.Tensor], Fields, None]:
        made = [torch.empty(size, dtype=self.stored.dtype) for size in mine.sizes.tolist()]
        archive.fill(slabs_of(self.stored, mine, made), verify=verify)
        return [part.to(self.local.dtype) for part in made], {}, None


def _on_all(read: Layout, ranks: Ranks) -> Layout:
    """The boxes of a round, all on each rank."""
    count = len(ranks.all)
    boxes = Boxes(np.tile(read.boxes.offsets, (count, 1)), np.tile(read.boxes.sizes, (count, 1)))
    return Layout.of(
        read.size, boxes, Places.on_ranks(np.repeat(np.array(ranks.all, dtype=np.int64), len(read)), "cpu")
    )


def rounds_of(stored: StoredTensor, wanted: Layout, ranks: Ranks) -> Iterator[Layout]:
    """Who reads what, round by round: boxes that together make up the tensor, each on one rank."""
    itemsize, everyone = stored.dtype.itemsize, np.array(ranks.all, dtype=np.int64)
    order = np.argsort(everyone, kind="stable")
    load = np.zeros(len(everyone), dtype=np.int64)
    fair = max(stored.nbytes // len(everyone), 2**20)
    boxes: list[tuple[list[int], list[int], int]] = []
    for offsets, sizes in _parts(stored, min(PART, fair) // itemsize):
        nbytes = torch.Size(sizes).numel() * itemsize
        _, rows = wanted.meeting(Boxes.parse([offsets], [sizes], len(sizes)))
        members = order[np.searchsorted(everyone[order], np.unique(wanted.ranks[rows]))]
        member = int(members[np.argmin(load[members])])
        if load[member] + nbytes > ROUND and boxes:
            least = int(np.argmin(load))  # one that does not need it, rather than another round
            member = least if load[least] + nbytes <= ROUND else member
        if load[member] + nbytes > ROUND and boxes:
            yield _layout(stored, boxes)
            boxes, load = [], np.zeros_like(load)
        load[member] += nbytes
        boxes.append((offsets, sizes, int(everyone[member])))
    if boxes:
        yield _layout(stored, boxes)


def _parts(stored: StoredTensor, most: int) -> Iterator[tuple[list[int], list[int]]]:
    """The stored boxes in parts of whole blocks."""
    for row in stored.layout.pattern.filled.tolist():
        box = stored.layout.at([row])
        first, extent = box.offsets[0].tolist(), box.sizes[0].tolist()
        for offsets, sizes in Blocks.of(extent, stored.dtype.itemsize).parts(most):
            yield [begin + at for begin, at in zip(first, offsets, strict=True)], sizes


def _layout(stored: StoredTensor, boxes: Sequence[tuple[list[int], list[int], int]]) -> Layout:
    found = Boxes.parse([box[0] for box in boxes], [box[1] for box in boxes], len(stored.size))
    return Layout.of(stored.size, found, Places.on_ranks(np.array([box[2] for box in boxes], dtype=np.int64), "cpu"))
