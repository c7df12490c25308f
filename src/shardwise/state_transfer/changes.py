"""What an expression does to one tensor: a box of it, its dims exchanged, made one or several, a part of it, zeros."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import reduce
from math import prod
from types import EllipsisType
from typing import Any, TypeAlias

from shardwise.checkpoint.name_patterns import NUMBER
from shardwise.errors import RecipeError, recipe_error
from shardwise.state_transfer.patches import ZEROS, Patchwork, joined

Span = tuple[int | None, int | None]  # a slice: those of Python cannot be hashed before 3.12
Item: TypeAlias = int | Span | str | EllipsisType | None


class Change(ABC):
    """A step from one tensor to another."""

    @abstractmethod
    def written(self, tensor: str) -> str:
        """How it is written, for a tensor that is written so."""

    @abstractmethod
    def made(self, tensor: Patchwork) -> Patchwork:
        """The other tensor; a `RecipeError` says what it wants instead of this one."""


@dataclass(frozen=True)
class IndexChange(Change):
    """A box of a tensor."""

    items: tuple[Item, ...]

    @staticmethod
    def parse(index: Any) -> IndexChange:
        """An index as it stands in brackets."""
        items = index if isinstance(index, tuple) else (index,)
        if sum(item is ... for item in items) > 1:
            raise wrong("an index in a recipe has at most one ...")
        return IndexChange(tuple(map(_as_item, items)))

    def written(self, tensor: str) -> str:
        """In brackets."""
        return f"{tensor}[{', '.join(map(_item_text, self.items)) or '()'}]"

    def made(self, tensor: Patchwork) -> Patchwork:
        """The box, without dims that an int is given for."""
        named = sum(item is not None and item is not ... for item in self.items)
        if named > len(tensor.size):
            raise wrong(f"there should be at least {named} dims")
        items = list(self.items) if ... in self.items else [*self.items, ...]
        at = items.index(...)
        items[at : at + 1] = [(None, None)] * (len(tensor.size) - named)
        dim = 0
        for item in items:
            if isinstance(item, int):
                here = tensor.size[dim]
                if not -here <= item < here:
                    raise wrong(f"index {item} is out of range")
                tensor = tensor.narrow(dim, item % here, 1).squeeze(dim)
                continue
            if item is None:
                tensor = tensor.unsqueeze(dim)
            elif isinstance(item, tuple):
                start, stop, _ = slice(*item).indices(tensor.size[dim])
                tensor = tensor.narrow(dim, start, max(stop - start, 0))
            else:
                raise wrong("only a recipe says what number # is")
            dim += 1
        return tensor


@dataclass(frozen=True)
class Transpose(Change):
    """Two dims exchanged; None for those of a matrix."""

    dims: tuple[int, int] | None

    def written(self, tensor: str) -> str:
        """As the attribute of tensors that does it."""
        known = {None: "T", (-2, -1): "mT"}
        return f"{tensor}.{known[self.dims]}" if self.dims in known else f"{tensor}.transpose{self.dims}"

    def made(self, tensor: Patchwork) -> Patchwork:
        """The same patches, turned."""
        if self.dims is None and len(tensor.size) != 2:
            raise wrong(".T is for two dims, .mT and .transpose for more")
        first, second = (dim_of(dim, len(tensor.size)) for dim in self.dims or (0, 1))
        return tensor.transpose(first, second)


@dataclass(frozen=True)
class Flatten(Change):
    """Several dims as one."""

    start: int
    end: int

    def written(self, tensor: str) -> str:
        """As the method of tensors."""
        return f"{tensor}.flatten({self.start}, {self.end})"

    def made(self, tensor: Patchwork) -> Patchwork:
        """One dim after the other joined to the first."""
        start, end = (dim_of(dim, len(tensor.size)) for dim in (self.start, self.end))
        if start > end:
            raise wrong(f"dim {self.start} should not come behind dim {self.end}")
        return reduce(lambda so_far, _: so_far.flatten(start), range(start, end), tensor)


@dataclass(frozen=True)
class Unflatten(Change):
    """One dim as several."""

    dim: int
    sizes: tuple[int, ...]

    def written(self, tensor: str) -> str:
        """As the method of tensors."""
        return f"{tensor}.unflatten({self.dim}, {self.sizes})"

    def made(self, tensor: Patchwork) -> Patchwork:
        """One dim after the other cut off at the front."""
        dim = dim_of(self.dim, len(tensor.size))
        here, known, left_open = tensor.size[dim], prod(size for size in self.sizes if size != -1), -1 in self.sizes
        if not self.sizes or self.sizes.count(-1) > 1 or min(self.sizes) < -1:
            raise wrong("there should be sizes, at most one of them -1")
        if (not known or here % known) if left_open else known != here:
            raise wrong(f"dim {self.dim} should be made up of {self.sizes}")
        sizes = [here // known if size == -1 else size for size in self.sizes]
        for k, size in enumerate(sizes[:-1]):
            tensor = tensor.unflatten(dim + k, size, prod(sizes[k + 1 :]))
        return tensor


@dataclass(frozen=True)
class Part(Change):
    """One of the parts of a tensor that was put together, maybe by groups."""

    which: int
    shares: tuple[int, ...]
    groups: int
    dim: int

    def written(self, tensor: str) -> str:
        """With the options that matter."""
        options = options_text(groups=(self.groups, 1), dim=(self.dim, 0))
        return f"{tensor}.part({self.which}, of={self.shares}{options})"

    def made(self, tensor: Patchwork) -> Patchwork:
        """Its stretch of each group."""
        dim, total = dim_of(self.dim, len(tensor.size)), sum(self.shares)
        if not 0 <= self.which < len(self.shares):
            raise wrong(f"there is no part {self.which} of {self.shares}")
        if tensor.size[dim] % (self.groups * total):
            cut = f"{total} shares" if self.groups == 1 else f"{self.groups} groups of {total} shares"
            raise wrong(f"dim {self.dim} should divide evenly into {cut}")
        inner = tensor.size[dim] // self.groups
        start, length = (inner * share // total for share in (sum(self.shares[: self.which]), self.shares[self.which]))
        if self.groups == 1:
            return tensor.narrow(dim, start, length)
        return tensor.unflatten(dim, self.groups, inner).narrow(dim + 1, start, length).flatten(dim)


@dataclass(frozen=True)
class Pad(Change):
    """Zeros behind a tensor."""

    size: int
    dim: int

    def written(self, tensor: str) -> str:
        """As the function."""
        return f"pad({tensor}, {self.size}{options_text(dim=(self.dim, 0))})"

    def made(self, tensor: Patchwork) -> Patchwork:
        """With a patch of zeros."""
        dim = dim_of(self.dim, len(tensor.size))
        missing = self.size - tensor.size[dim]
        if missing < 0:
            raise wrong(f"dim {self.dim} should be at most {self.size}")
        zeros = Patchwork.whole(ZEROS, (*tensor.size[:dim], missing, *tensor.size[dim + 1 :]))
        return joined([tensor, zeros], dim)


def wrong(what: str) -> RecipeError:
    """The error for one problem."""
    return recipe_error([what])


def dim_of(dim: int, ndim: int) -> int:
    """A dim counted from the front."""
    if not -ndim <= dim < ndim:
        raise wrong(f"there should be a dim {dim}")
    return dim % ndim


def as_int(given: Any, what: str) -> int:
    """An integer, of any type that is one."""
    try:
        if not isinstance(given, bool):
            return operator.index(given)
    except TypeError:
        pass
    raise wrong(f"{what} in a recipe is an integer, not {given!r:.80}")


def as_positive(given: Any, what: str) -> int:
    """An integer above 0."""
    number = as_int(given, what)
    if number < 1:
        raise wrong(f"{what} in a recipe is at least 1, not {number}")
    return number


def options_text(**given: tuple[int, int]) -> str:
    """Options and their defaults, as they are written behind other arguments."""
    return "".join(f", {name}={value}" for name, (value, default) in given.items() if value != default)


def _as_item(item: Any) -> Item:
    if item is None or item is ...:
        return item
    if isinstance(item, str) and item == NUMBER:
        return item
    if isinstance(item, slice):
        if item.step not in (None, 1):
            raise wrong(f"a slice in a recipe has step 1, not {item.step!r}")
        start, stop = (None if end is None else as_int(end, "an end of a slice") for end in (item.start, item.stop))
        return start, stop
    return as_int(item, "an index")


def _item_text(item: Item) -> str:
    if item is ...:
        return "..."
    if isinstance(item, tuple):
        return ":".join("" if end is None else str(end) for end in item)
    return repr(item)
