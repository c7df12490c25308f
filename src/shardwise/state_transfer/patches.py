"""`Patch`: a box of one tensor that stands for a box of another; `Patchwork`: a tensor that is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Ints = tuple[int, ...]

ZEROS = None  # the source of a patch that is all zeros


class Patch(NamedTuple):  # there are many: a tuple is made faster than a frozen dataclass
    """The box ``[offsets, offsets + sizes)`` of a source, with its dims in another order, at a place in a result.

    ``dims`` has, for each dim of the result, the dim of the source that it is, or None for a new dim of size 1. A dim
    of the source that is not in ``dims`` has size 1 in the box.
    """

    source: str | None
    offsets: Ints
    sizes: Ints
    dims: tuple[int | None, ...]
    at: Ints

    @property
    def extents(self) -> Ints:
        """The sizes of the box in the result."""
        return tuple(1 if dim is None else self.sizes[dim] for dim in self.dims)

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def moved(self, dim: int, by: int) -> Patch:
        """The same box further on in the result."""
        return self._replace(at=_with(self.at, dim, self.at[dim] + by)) if by else self

    def narrow(self, dim: int, start: int, length: int) -> Patch:
        """What of it lies in this stretch of a dim of the result, which holds a part of it."""
        own = self.dims[dim]
        if own is None:
            return self
        begin = max(start, self.at[dim])
        length = min(start + length, self.at[dim] + self.sizes[own]) - begin
        offsets = _with(self.offsets, own, self.offsets[own] + begin - self.at[dim])
        return self._replace(offsets=offsets, sizes=_with(self.sizes, own, length), at=_with(self.at, dim, begin))

    def with_dims(self, dims: Sequence[int | None], at: Sequence[int]) -> Patch:
        """The same box, in a result of other dims."""
        return self._replace(dims=tuple(dims), at=tuple(at))


@dataclass(frozen=True)
class Patchwork:
    """A tensor of a size, each element of which is in one patch; its methods are those of tensors."""

    size: Ints
    patches: tuple[Patch, ...]

    @staticmethod
    def whole(source: str | None, size: Iterable[int]) -> Patchwork:
        """One source as it is."""
        sizes = tuple(size)
        every = tuple(range(len(sizes)))
        patch = Patch(source, (0,) * len(sizes), sizes, every, (0,) * len(sizes))
        return Patchwork(sizes, (patch,) if patch.volume else ())

    def narrow(self, dim: int, start: int, length: int) -> Patchwork:
        """A stretch of a dim."""
        if length == self.size[dim]:
            return self
        size = _with(self.size, dim, length)
        if not prod(size):
            return Patchwork(size, ())
        inside = (p for p in self.patches if p.at[dim] < start + length and start < p.at[dim] + p.extents[dim])
        return Patchwork(size, tuple(p.narrow(dim, start, length).moved(dim, -start) for p in inside))

    def squeeze(self, dim: int) -> Patchwork:
        """Without a dim of size 1."""
        kept = [d for d in range(len(self.size)) if d != dim]
        return self._chosen(kept)

    def unsqueeze(self, dim: int) -> Patchwork:
        """With a new dim of size 1."""
        patches = (p.with_dims(_inserted(p.dims, dim, None), _inserted(p.at, dim, 0)) for p in self.patches)
        return Patchwork(tuple(_inserted(self.size, dim, 1)), tuple(patches))

    def transpose(self, first: int, second: int) -> Patchwork:
        """With two dims exchanged."""
        order = list(range(len(self.size)))
        order[first], order[second] = second, first
        return self._chosen(order)

    def flatten(self, dim: int) -> Patchwork:
        """With a dim and the next as one."""
        inner = self.size[dim + 1]
        size = (*self.size[:dim], self.size[dim] * inner, *self.size[dim + 2 :])
        patches: list[Patch] = []
        for patch in self.patches:
            for row in [patch] if inner == 1 else _unit_rows(patch, dim):
                own = row.dims[dim] if inner == 1 else row.dims[dim + 1]
                at = (*row.at[:dim], row.at[dim] * inner + row.at[dim + 1], *row.at[dim + 2 :])
                patches.append(row.with_dims((*row.dims[:dim], own, *row.dims[dim + 2 :]), at))
        return Patchwork(size, tuple(patches))

    def unflatten(self, dim: int, outer: int, inner: int) -> Patchwork:
        """With a dim as two, of these sizes."""
        size = (*self.size[:dim], outer, inner, *self.size[dim + 1 :])
        patches: list[Patch] = []
        for patch in self.patches:
            begin, end = patch.at[dim], patch.at[dim] + patch.extents[dim]
            rows = [begin // inner] if inner == 1 else range(begin // inner, -(-end // inner))
            for row in rows:
                piece = patch if inner == 1 else patch.narrow(dim, row * inner, inner)
                own = piece.dims[dim]
                dims = (own, None) if inner == 1 else (None, own)
                at = (*piece.at[:dim], row, piece.at[dim] - row * inner, *piece.at[dim + 1 :])
                patches.append(piece.with_dims((*piece.dims[:dim], *dims, *piece.dims[dim + 1 :]), at))
        return Patchwork(size, tuple(patches))

    def merged(self) -> Patchwork:
        """The same with fewer patches: neighbours that are one box of one source again are one patch."""
        patches, before = list(self.patches), -1
        while len(patches) != before and len(patches) > 1:
            before = len(patches)
            for dim in reversed(range(len(self.size))):
                patches = _merged_along(patches, dim)
        return Patchwork(self.size, tuple(sorted(map(_all_named, patches), key=lambda p: p.at)))

    def _chosen(self, order: Sequence[int]) -> Patchwork:
        """With these dims, in this order; the others have size 1."""
        patches = (p.with_dims([p.dims[d] for d in order], [p.at[d] for d in order]) for p in self.patches)
        return Patchwork(tuple(self.size[d] for d in order), tuple(patches))


def joined(parts: Sequence[Patchwork], dim: int) -> Patchwork:
    """One behind the other in a dim; their other sizes are equal."""
    patches: list[Patch] = []
    end = 0
    for part in parts:
        patches += (p.moved(dim, end) for p in part.patches)
        end += part.size[dim]
    return Patchwork(_with(parts[0].size, dim, end), tuple(patches))


def _unit_rows(patch: Patch, dim: int) -> list[Patch]:
    """A patch cut so that each piece has size 1 in a dim."""
    begin = patch.at[dim]
    return [patch.narrow(dim, row, 1) for row in range(begin, begin + patch.extents[dim])]


def _merged_along(patches: list[Patch], dim: int) -> list[Patch]:
    done: list[Patch] = []
    for patch in sorted(patches, key=lambda p: (p.at[:dim], p.at[dim + 1 :], p.at[dim])):
        both = _as_one(done[-1], patch, dim) if done else None
        if both is None:
            done.append(patch)
        else:
            done[-1] = both
    return done


def _as_one(one: Patch, other: Patch, dim: int) -> Patch | None:
    """Two patches as one box, if the second goes on where the first ends in this dim of the result."""
    mine, theirs = one.extents, other.extents
    together = other.at == _with(one.at, dim, one.at[dim] + mine[dim]) and theirs == _with(mine, dim, theirs[dim])
    if not together or one.source != other.source:
        return None
    if one.source == ZEROS:
        box = _with(mine, dim, mine[dim] + theirs[dim])
        return Patch(ZEROS, (0,) * len(box), box, tuple(range(len(box))), one.at)
    own = _common_dim(one, other, dim)
    if own is None or (one.sizes[own], other.sizes[own]) != (mine[dim], theirs[dim]):
        return None
    follows = other.offsets == _with(one.offsets, own, one.offsets[own] + one.sizes[own])
    alike = other.sizes == _with(one.sizes, own, other.sizes[own]) and all(
        a == b for d, (a, b) in enumerate(zip(one.dims, other.dims, strict=True)) if d != dim and mine[d] > 1
    )
    if not follows or not alike:
        return None
    # A dim of size 1 that the source's dim stood for so far gets the one that is free now.
    dims = [one.dims[dim] if d == own else d for d in one.dims]
    dims[dim] = own
    return one._replace(sizes=_with(one.sizes, own, one.sizes[own] + other.sizes[own]), dims=tuple(dims))


def _all_named(patch: Patch) -> Patch:
    """The same with a dim of the source for each of the result, as far as there are any."""
    if None not in patch.dims:
        return patch
    free = iter([d for d in range(len(patch.sizes)) if d not in patch.dims])
    return patch._replace(dims=tuple(next(free, None) if d is None else d for d in patch.dims))


def _common_dim(one: Patch, other: Patch, dim: int) -> int | None:
    """The dim of the source along which two patches can be neighbours."""
    for patch in (one, other):
        if patch.extents[dim] > 1:
            return patch.dims[dim]
    steps = [d for d, (a, b) in enumerate(zip(one.offsets, other.offsets, strict=True)) if a != b]
    return steps[0] if len(steps) == 1 else None


def _with(numbers: Ints, dim: int, number: int) -> Ints:
    return (*numbers[:dim], number, *numbers[dim + 1 :])


def _inserted(values: Sequence[T], at: int, value: T) -> list[T]:
    return [*values[:at], value, *values[at:]]
