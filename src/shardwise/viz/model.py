"""What a module holds, tensor by tensor and rank by rank. Tensors that are alike but for their layer are one entry."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from shardwise.errors import PropertyError
from shardwise.viz.subjects import LayoutLike, Sharded

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


@dataclass(frozen=True)
class Entry:
    """One tensor of a module, or several that differ in the numbers in their names only."""

    name: str
    count: int
    size: torch.Size
    dtype: torch.dtype
    layout: LayoutLike | None  # None: plain, whole on every rank

    @property
    def elements(self) -> int:
        """Of all of them, each once."""
        return self.count * self.size.numel()

    @property
    def bytes(self) -> int:
        """Of all of them, each element once."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class Held:
    """What one rank holds: bytes of shards, and of plain tensors."""

    rank: int
    sharded: int
    plain: int


def entries_of(module: nn.Module) -> list[Entry]:
    """Parameters and buffers, in order; tied ones count once."""
    alike: dict[tuple[object, ...], list[tuple[str, torch.Tensor, LayoutLike | None]]] = {}
    seen: set[int] = set()
    for name, tensor in _tensors(module):
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        layout = tensor._layout if isinstance(tensor, Sharded) else None
        if layout is None and hasattr(tensor, "device_mesh"):
            raise PropertyError(f"{name!r} is a {type(tensor).__name__}: convert it with from_dtensor to draw it")
        key = (NUMBER.sub("*", name), tensor.shape, tensor.dtype, layout)
        alike.setdefault(key, []).append((name, tensor, layout))
    found = []
    for (pattern, *_), members in alike.items():
        name, tensor, layout = members[0]
        found.append(
            Entry(str(pattern) if len(members) > 1 else name, len(members), tensor.shape, tensor.dtype, layout)
        )
    return found


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():  # of the old kind: sharded tensors that are attributes
            if isinstance(value, torch.Tensor) and isinstance(value, Sharded):
                yield f"{path}.{name}" if path else name, value


def held_by_rank(entries: Sequence[Entry]) -> list[Held]:
    """What each rank holds, for all ranks that hold a shard; without any, of one rank, which stands for all."""
    plain = sum(entry.bytes for entry in entries if entry.layout is None)
    sharded: dict[int, int] = {}
    for entry in entries:
        if entry.layout is None:
            continue
        ranks, number = np.unique(entry.layout.ranks, return_inverse=True)
        elements = np.zeros(len(ranks), dtype=np.int64)
        np.add.at(elements, number.reshape(-1), entry.layout.boxes.volumes)
        for rank, count in zip(ranks.tolist(), elements.tolist(), strict=True):
            sharded[rank] = sharded.get(rank, 0) + count * entry.count * entry.dtype.itemsize
    return [Held(rank, sharded[rank], plain) for rank in sorted(sharded)] or [Held(-1, 0, plain)]


def how_text(layout: LayoutLike | None) -> str:
    """How a tensor lies, in few words: ``dim 0 in 4, 2 copies``."""
    if layout is None:
        return "plain, on every rank"
    boxes = layout.boxes.take(layout.boxes.filled)
    parts = []
    for dim in range(boxes.ndim):
        cuts = len(np.unique(np.concatenate([boxes.offsets[:, dim], boxes.ends[:, dim]]))) - 1
        if cuts > 1:
            parts.append(f"dim {dim} in {cuts}")
    copies = int(boxes.volumes.sum()) / max(layout.size.numel(), 1)
    if copies > 1:
        parts.append(f"{copies:g} copies" if copies == int(copies) else f"{copies:.1f} copies on average")
    ranks = len(set(layout.ranks.tolist()))
    return ", ".join(parts) or f"whole on {ranks} rank{'s' * (ranks != 1)}"
