"""`Filling`: tensors of a state on their way from an archive: what each rank reads for itself, and what is relayed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import increment_version

from shardwise.archive import Archive, StoredTensor
from shardwise.archive.reading import Located
from shardwise.archive.slabs import Slab, slabs_of
from shardwise.checkpoint.local import Local
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.relay import Costs, Relay, is_relayed
from shardwise.errors import CheckpointError
from shardwise.process_group import Fields

Pair = tuple[str, torch.Tensor, StoredTensor]  # how messages call a tensor, itself, and what fills it


@dataclass(frozen=True, eq=False)
class Filling:
    """All that is to be read, checked and located, with its files open."""

    archive: Archive
    ranks: Ranks
    verify: bool
    located: Sequence[Located | tuple[Slab, torch.Tensor]]
    relayed: Sequence[Relay]
    tensors: Sequence[torch.Tensor]  # all that are written into

    @staticmethod
    def of(
        archive: Archive, pairs: Sequence[Pair], ranks: Ranks, hosts: int, *, verify: bool, relays: bool = True
    ) -> Filling:
        """Everything that can be wrong is found here, before anything is changed. Nothing is sent.

        Without ``relays`` every rank reads for itself, whatever it costs.
        """
        costs = Costs.of(archive.storage, hosts)
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
        located = archive.located(slabs)
        if archive.index.sums is not None:
            for name in archive.index.names[ranks.all.index(ranks.here) :: len(ranks.all)]:
                archive.header(name)  # so that each file is looked at by one rank at least
        return Filling(archive, ranks, verify, located, relayed, tensors)

    @property
    def relays(self) -> str:
        """What must be the same on all ranks before `fill`: a digest of all that is relayed, in order."""
        return hashlib.blake2b(repr([relay.words for relay in self.relayed]).encode(), digest_size=8).hexdigest()

    @property
    def nbytes(self) -> int:
        """About how many bytes this rank reads."""
        direct = [one.slab if isinstance(one, Located) else one[0] for one in self.located]
        own = sum(torch.Size(slab.sizes).numel() * slab.stored.dtype.itemsize for slab in direct)
        return own + sum(relay.stored.nbytes for relay in self.relayed) // len(self.ranks.all)

    def fill(self) -> None:
        """Read everything into its place. Every rank calls it."""

        def read() -> tuple[None, Fields, None]:
            self.archive.fill_located(self.located, verify=self.verify)
            return None, {}, None

        try:
            self.ranks.in_step(read)
            with torch.inference_mode():  # in which inference tensors can be written into, too
                for relay in self.relayed:
                    relay.fill(self.archive, self.ranks, verify=self.verify)
        finally:
            increment_version([tensor for tensor in self.tensors if not tensor.is_inference()])


def _require_writable(name: str, local: Local) -> None:
    """Raise where elements of what is here share memory."""
    for tensor in local.tensors.values():
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise CheckpointError(f"'{name}' is expanded, so that elements share memory: load into a clone() of it")
