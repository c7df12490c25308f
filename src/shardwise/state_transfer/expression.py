"""The language that says how one tensor is made of others: all of it comes down to boxes that stand for boxes.

``take("q.weight")`` is a tensor of the source; a plain name stands for it wherever an expression is wanted::

    cat("q.weight", "k.weight", "v.weight")                       one behind the other, by default in dim 0
    interleave("q.weight", "k.weight", "v.weight", groups=8)      the first of 8 groups of each, then the second, …
    take("qkv.weight").part(0, of=(4, 1, 1), groups=8)            the way back: q of proportions 4 : 1 : 1
    take("gate_up.weight").part(1, of=(1, 1))                     the second half
    stack("experts.#.up.weight")                                  all numbers that the source has, in their order
    take("experts.up.weight")["#"]                                the way back, for the target "experts.#.up.weight"
    take("embed.weight")[:50257]                                  ints, slices of step 1, ..., and None for a new dim
    pad("embed.weight", 50304)                                    zeros behind it
    take("conv1d.weight").T                                       also .mT, .transpose(0, 1)
    take("q.kernel").flatten(1, 2)                                and .unflatten(0, (8, -1)): a patch for each head

Expressions are values: they can be compared and hashed, and their repr is what one writes. ``*`` and ``#`` in names
mean something only in a recipe: see `shardwise.state_transfer.recipe`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.errors import RecipeError, recipe_error
from shardwise.state_transfer import changes
from shardwise.state_transfer.changes import Change, as_int, as_positive, dim_of, options_text, wrong
from shardwise.state_transfer.patches import ZEROS, Patch, Patchwork, joined

Sizes = Mapping[str, Sequence[int]]

LONGEST = 200  # characters of an expression in an error


class Expression(ABC):
    """How a tensor is made of others. `take`, `cat`, `stack`, `interleave` and `pad` make them."""

    __iter__ = None  # or Python would try all indices, one after the other, without end

    def size(self, sizes: Sizes) -> torch.Size:
        """Its size, where the sources have these; a `RecipeError` lists all that does not fit."""
        return torch.Size(self._made(sizes).size)

    def patches(self, sizes: Sizes) -> list[Patch]:
        """The boxes of sources that it is made of, none of which overlap in the result."""
        return [patch for patch in self._made(sizes).merged().patches if patch.source != ZEROS]

    def gaps(self, sizes: Sizes) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The boxes of the result that no patch covers, as offsets and sizes: they are zeros."""
        return [(patch.at, patch.extents) for patch in self._made(sizes).merged().patches if patch.source == ZEROS]

    @property
    def sources(self) -> frozenset[str]:
        """The names of the tensors that it is made of."""
        return frozenset().union(*(part.sources for part in self._parts))

    @property
    def brief(self) -> str:
        """Its repr, without the middle of a long one."""
        text = repr(self)
        return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"

    def __getitem__(self, index: Any) -> Expression:
        return Changed(self, changes.IndexChange.parse(index))

    @property
    def T(self) -> Expression:  # noqa: N802 # as tensors have it
        """The transpose of a matrix."""
        return Changed(self, changes.Transpose(None))

    @property
    def mT(self) -> Expression:  # noqa: N802 # as tensors have it
        """With its last two dims exchanged."""
        return self.transpose(-2, -1)

    def transpose(self, dim0: int, dim1: int) -> Expression:
        """With two dims exchanged."""
        return Changed(self, changes.Transpose((as_int(dim0, "a dim"), as_int(dim1, "a dim"))))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Expression:
        """With all dims from one to another as one; a patch for each index into all of them but the last."""
        return Changed(self, changes.Flatten(as_int(start_dim, "a dim"), as_int(end_dim, "a dim")))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Expression:
        """With one dim as several of these sizes, one of which may be -1; a patch for each index but into the last."""
        return Changed(self, changes.Unflatten(as_int(dim, "a dim"), tuple(as_int(size, "a size") for size in sizes)))

    def part(self, which: int, *, of: Sequence[int], groups: int = 1, dim: int = 0) -> Expression:
        """One of the parts that `cat`, or with groups `interleave`, made this of; ``of`` are their proportions."""
        shares = tuple(as_positive(share, "a share") for share in of)
        part = changes.Part(as_int(which, "a part"), shares, as_positive(groups, "groups"), as_int(dim, "a dim"))
        return Changed(self, part)

    def replaced(self, change: Callable[[Expression], Expression]) -> Expression:
        """The same with each expression in it, the innermost first and itself last, as the function changes it."""
        parts = tuple(part.replaced(change) for part in self._parts)
        return change(self if parts == self._parts else self._of(parts))

    @property
    @abstractmethod
    def _parts(self) -> tuple[Expression, ...]:
        """The expressions that it is made of."""

    @abstractmethod
    def _of(self, parts: tuple[Expression, ...]) -> Expression:
        """The same of others."""

    @abstractmethod
    def _made(self, sizes: Sizes) -> Patchwork:
        """Its patches, zeros included."""

    def _as_part(self) -> str:
        """How it is written inside another expression."""
        return repr(self)


@dataclass(frozen=True, repr=False)
class Take(Expression):
    """A tensor of the source, by its name."""

    name: str

    def __repr__(self) -> str:
        return f"take({self.name!r})"

    @property
    def sources(self) -> frozenset[str]:
        """Its own name."""
        return frozenset([self.name])

    @property
    def _parts(self) -> tuple[Expression, ...]:
        return ()

    def _of(self, parts: tuple[Expression, ...]) -> Expression:
        return self

    def _made(self, sizes: Sizes) -> Patchwork:
        if self.name not in sizes:
            raise wrong(f"there is no source '{self.name}'")
        return Patchwork.whole(self.name, sizes[self.name])

    def _as_part(self) -> str:
        return repr(self.name)


@dataclass(frozen=True, repr=False)
class Changed(Expression):
    """A tensor made of one other."""

    of: Expression
    change: Change

    def __repr__(self) -> str:
        return self.change.written(self.of._as_part() if isinstance(self.change, changes.Pad) else repr(self.of))

    @property
    def _parts(self) -> tuple[Expression, ...]:
        return (self.of,)

    def _of(self, parts: tuple[Expression, ...]) -> Expression:
        return replace(self, of=parts[0])

    def _made(self, sizes: Sizes) -> Patchwork:
        made = self.of._made(sizes)
        try:
            return self.change.made(made)
        except RecipeError as error:
            raise wrong(f"{self.brief}: {error}, but {self.of.brief} is of size {made.size}") from None


@dataclass(frozen=True, repr=False)
class _OfSeveral(Expression):
    """An expression made of others."""

    parts: tuple[Expression, ...]

    @property
    def _parts(self) -> tuple[Expression, ...]:
        return self.parts

    def _of(self, parts: tuple[Expression, ...]) -> Expression:
        return replace(self, parts=parts)

    def _all_made(self, sizes: Sizes) -> list[Patchwork]:
        made: list[Patchwork] = []
        problems: list[str] = []
        for part in self.parts:
            try:
                made.append(part._made(sizes))
            except RecipeError as error:
                problems += error.problems
        if problems:
            raise recipe_error(list(dict.fromkeys(problems)))
        return made

    def _dim(self, dim: int, ndim: int) -> int:
        try:
            return dim_of(dim, ndim)
        except RecipeError as error:
            raise wrong(f"{self.brief}: {error}, but there are {ndim}") from None

    def _require_alike(self, made: Sequence[Patchwork], dim: int | None) -> None:
        """Raise unless all sizes are equal, but for one dim."""
        first = made[0].size
        for part, expression in zip(made, self.parts, strict=True):
            other = [d for d in range(max(len(first), len(part.size))) if d != dim]
            if len(first) != len(part.size) or any(first[d] != part.size[d] for d in other):
                where = "" if dim is None else f" except in dim {dim}"
                both = f"{self.parts[0].brief} is of size {first} and {expression.brief} of size {part.size}"
                raise wrong(f"{self.brief}: its parts should be of one size{where}, but {both}")


@dataclass(frozen=True, repr=False)
class Concatenated(_OfSeveral):
    """One behind the other; with groups, the first group of each, then the second of each, and so on."""

    dim: int
    groups: int = 1

    def __repr__(self) -> str:
        name = "cat" if self.groups == 1 else "interleave"
        options = options_text(groups=(self.groups, 1), dim=(self.dim, 0))
        return f"{name}({', '.join(part._as_part() for part in self.parts)}{options})"

    def _made(self, sizes: Sizes) -> Patchwork:
        made = self._all_made(sizes)
        dim = self._dim(self.dim, len(made[0].size))
        self._require_alike(made, dim)
        if self.groups == 1:
            return joined(made, dim)
        evenly = f"dim {dim} should divide evenly into {self.groups} groups"
        problems = [
            f"{self.brief}: {evenly}, but {expression.brief} is of size {part.size}"
            for part, expression in zip(made, self.parts, strict=True)
            if part.size[dim] % self.groups
        ]
        if problems:
            raise recipe_error(problems)
        apart = [part.unflatten(dim, self.groups, part.size[dim] // self.groups) for part in made]
        return joined(apart, dim + 1).flatten(dim)


@dataclass(frozen=True, repr=False)
class Stacked(_OfSeveral):
    """Along a new dim."""

    dim: int

    def __repr__(self) -> str:
        return f"stack({', '.join(part._as_part() for part in self.parts)}{options_text(dim=(self.dim, 0))})"

    def _made(self, sizes: Sizes) -> Patchwork:
        made = self._all_made(sizes)
        dim = self._dim(self.dim, len(made[0].size) + 1)
        self._require_alike(made, None)
        return joined([part.unsqueeze(dim) for part in made], dim)


Given = str | Expression  # a name stands for the tensor


def take(name: str) -> Take:
    """A tensor of the source, to take a part of it or turn it; where it is taken as it is, its name is enough."""
    if not isinstance(name, str) or not name:
        raise wrong(f"take() wants the name of a source, not {name!r:.80}")
    return Take(name)


def cat(*parts: Given, dim: int = 0) -> Expression:
    """Tensors one behind the other in a dim, as `torch.cat` does."""
    return Concatenated(_expressions("cat", parts), as_int(dim, "a dim"))


def stack(*parts: Given, dim: int = 0) -> Expression:
    """Tensors along a new dim, as `torch.stack` does. ``#`` in a name runs over all numbers that the source has."""
    return Stacked(_expressions("stack", parts), as_int(dim, "a dim"))


def interleave(*parts: Given, groups: int, dim: int = 0) -> Expression:
    """Tensors cut into even groups in a dim: the first group of each, then the second group of each, and so on."""
    return Concatenated(_expressions("interleave", parts), as_int(dim, "a dim"), as_positive(groups, "groups"))


def pad(part: Given, size: int, *, dim: int = 0) -> Expression:
    """A tensor with zeros behind it, so that a dim has this size."""
    return Changed(as_expression(part), changes.Pad(as_int(size, "a size"), as_int(dim, "a dim")))


def as_expression(given: Given) -> Expression:
    """An expression, for which a name may stand."""
    if isinstance(given, Expression):
        return given
    if isinstance(given, str):
        return take(given)
    raise wrong(f"{given!r:.80} is neither the name of a source nor an expression")


def _expressions(verb: str, parts: Iterable[Given]) -> tuple[Expression, ...]:
    made = tuple(map(as_expression, parts))
    if not made:
        raise wrong(f"{verb}() wants at least one name or expression")
    return made
