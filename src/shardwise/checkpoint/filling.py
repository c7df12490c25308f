"""`Filling`: the reads that fill the tensors of a state from an archive, directly or relayed by other ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import increment_version

from shardwise.checkpoint.archive import Archive, StoredTensor
from shardwise.checkpoint.archive.reading import LocatedSlab
from shardwise.checkpoint.archive.slabs import Slab, slabs_of
from shardwise.checkpoint.local import Local
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.relay import ReadCosts, Relay, is_relayed
from shardwise.errors import CheckpointError

Pair = tuple[str, torch.Tensor, StoredTensor]  # the name of a tensor in messages, the tensor, and what fills it


@dataclass(frozen=True, eq=False)
class Filling:
    """All reads of a load, checked, with their files open."""

    archive: Archive
    ranks: Ranks
    verify: bool
    located: Sequence[LocatedSlab | tuple[Slab, torch.Tensor]]
    relayed: Sequence[Relay]
    tensors: Sequence[torch.Tensor]  # all local tensors that are written into

    @staticmethod
    def of(
        archive: Archive, pairs: Sequence[Pair], ranks: Ranks, hosts: int, *, verify: bool, relays: bool = True
    ) -> Filling:
        """Plan and check all reads before anything changes. No communication.

        Without ``relays`` every rank reads for itself.
        """
        costs = ReadCosts.of(archive.storage, hosts)
        slabs: list[Slab] = []
        relayed: list[Relay] = []
        tensors: list[torch.Tensor] = []
        for name, tensor, stored in pairs:
            local = Local.of(name, tensor, ranks)
            _require_writable(name, local)
            tensors += local.tensors.values()
            if relays and is_relayed(stored, local, ranks, costs, verify=verify):
                relayed.append(Relay.of(archive, stored, local, ranks))
            else:
                slabs += slabs_of(stored, local.layout.at(list(local.tensors)), list(local.tensors.values()))
        located = archive.locate_all(slabs)
        if archive.index.sums is not None:
            for name in archive.index.names[ranks.all.index(ranks.here) :: len(ranks.all)]:
                archive.header(name)  # so that at least one rank checks each file
        return Filling(archive, ranks, verify, located, relayed, tensors)

    @property
    def relays(self) -> str:
        """A digest of all relays in order, which must be the same on all ranks before `fill`."""
        return hashlib.blake2b(repr([relay.words for relay in self.relayed]).encode(), digest_size=8).hexdigest()

    @property
    def nbytes(self) -> int:
        """The bytes that this rank reads, approximately."""
        direct = [one.slab if isinstance(one, LocatedSlab) else one[0] for one in self.located]
        own = sum(torch.Size(slab.sizes).numel() * slab.stored.dtype.itemsize for slab in direct)
        return own + sum(relay.stored.nbytes for relay in self.relayed) // len(self.ranks.all)

    def fill(self) -> None:
        """Read everything into the tensors. Every rank calls this."""
        try:
            self.ranks.together(lambda: self.archive.fill_located(self.located, verify=self.verify))
            with torch.inference_mode():  # allows writing into inference tensors
                for relay in self.relayed:
                    relay.fill(self.archive, self.ranks, verify=self.verify)
        finally:
            increment_version([tensor for tensor in self.tensors if not tensor.is_inference()])


def _require_writable(name: str, local: Local) -> None:
    """Raise where elements of a local tensor share memory."""
    for tensor in local.tensors.values():
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise CheckpointError(f"'{name}' is expanded, so that elements share memory: load into a clone() of it")
