"""``shardwise diff``: compares the names, sizes, dtypes and values of two checkpoints."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.checkpoint.archive import open_archive
from shardwise.checkpoint.archive.blocks import Blocks
from shardwise.checkpoint.archive.stored import dtype_name
from shardwise.layout.pictures.words import bytes_text, numbered, size_text
from shardwise.tools.cli.console import Column, Console, names, numbers
from shardwise.tools.cli.contents import Contents, HeldTensor

WORKSPACE = 40  # bytes for each compared element, beyond the two that are read
MOST_NAMES = 20  # listed of those on one side only


@dataclass
class Difference:
    """The difference between the values of two tensors."""

    elements: int = 0  # that differ by more than the tolerance
    largest: float = 0.0
    relative: float = 0.0
    at: list[int] | None = None  # the index of the largest difference
    worst: float = -1.0


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command. ``--only`` and ``--rename`` apply to A; B's entries are matched by name."""
    with open_archive(options.a) as first, open_archive(options.b) as second:
        here = Contents.of(first).selected(options.only).renamed(options.rename)
        there = Contents.of(second)
        mine, theirs = _matched(here.by_name, there.by_name)
        values = _matched(here.values_by_name, there.values_by_name)
        only_here = [name for name in (*mine, *values[0]) if name not in theirs and name not in values[1]]
        only_there = [name for name in (*theirs, *values[1]) if name not in mine and name not in values[0]]
        if options.only:
            only_there = []
        common = [name for name in mine if name in theirs]
        shapes = {name: (mine[name].stored.size, theirs[name].stored.size) for name in common}
        shapes = {name: pair for name, pair in shapes.items() if pair[0] != pair[1]}
        dtypes = {name: (mine[name].stored.dtype, theirs[name].stored.dtype) for name in common}
        dtypes = {name: pair for name, pair in dtypes.items() if pair[0] != pair[1]}
        total = sum(mine[name].stored.nbytes for name in common if name not in shapes)
        found: dict[str, Difference] = {}
        with console.progress("comparing", total) as on_read:
            for name in common:
                if name not in shapes:
                    pair = mine[name], theirs[name]
                    difference = compare(*pair, options.rtol, options.atol, options.max_memory, on_read)
                    if difference.elements:
                        found[name] = difference
        plain = {
            name: (value, values[1][name])
            for name, value in values[0].items()
            if name in values[1] and not _same(value, values[1][name])
        }
        kinds = [
            name
            for name in (*mine, *values[0])
            if (name in mine) != (name in theirs) and _is_on_both(name, mine, theirs, values)
        ]
    different = bool(only_here or only_there or shapes or dtypes or found or plain or kinds)
    report = _Report(options, only_here, only_there, shapes, dtypes, found, plain, kinds, mine, total)
    report.give(console, different, len(common))
    return int(different)


def _is_on_both(name: str, mine: Any, theirs: Any, values: Any) -> bool:
    return (name in mine or name in values[0]) and (name in theirs or name in values[1])


def compare(
    mine: HeldTensor, theirs: HeldTensor, rtol: float, atol: float, max_memory: int, on_read: Callable[[int], object]
) -> Difference:
    """Compare two tensors of the same size, one part at a time."""
    size, result = mine.stored.size, Difference()
    if not size.numel():
        return result
    itemsize = max(mine.stored.dtype.itemsize, theirs.stored.dtype.itemsize)
    most = max(max_memory // (2 * itemsize + WORKSPACE), 1)
    for offsets, sizes in Blocks.of(size, itemsize).parts(most):
        one = mine.archive.read_box(mine.stored, offsets, sizes)
        other = theirs.archive.read_box(theirs.stored, offsets, sizes)
        _compare_part(one, other, rtol, atol, offsets, result)
        on_read(one.nbytes)
    return result


def _compare_part(
    one: torch.Tensor, other: torch.Tensor, rtol: float, atol: float, offsets: list[int], result: Difference
) -> None:
    if one.dtype == other.dtype and torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)):
        return
    a, b = _comparable(one, other)
    both_nan = torch.isnan(a) & torch.isnan(b)
    apart = (a - b).abs().to(torch.float64)
    apart[both_nan | (a == b)] = 0  # inf - inf is nan
    if not (a.is_complex() or one.is_floating_point() or other.is_floating_point()):
        unequal = one.to(torch.int64) != other.to(torch.int64)
        apart[unequal & (apart == 0)] = 1  # large integers that are equal as floats
    apart[torch.isnan(apart)] = math.inf
    scale = b.abs().to(torch.float64)
    finite = torch.isfinite(scale)
    beyond = torch.where(finite, apart > atol + rtol * torch.where(finite, scale, 0.0), apart > 0)
    count = int(beyond.sum())
    if not count:
        return
    result.elements += count
    apart = torch.where(beyond, apart, 0.0)
    largest = float(apart.max())
    if largest > result.worst:
        flat = int(apart.argmax())
        index = torch.unravel_index(torch.tensor(flat), tuple(apart.shape)) if apart.ndim else ()
        result.at = [int(k) + offset for k, offset in zip(index, offsets, strict=True)]
        result.worst = result.largest = largest
    relative = torch.where(beyond & (scale > 0), apart / scale, 0.0)
    result.relative = max(result.relative, float(relative.max()))


def _comparable(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in a dtype that holds their difference."""
    if one.is_complex() or other.is_complex():
        return one.to(torch.complex128), other.to(torch.complex128)
    return one.to(torch.float64), other.to(torch.float64)


@dataclass
class _Report:
    """Prints the differences."""

    options: argparse.Namespace
    only_here: list[str]
    only_there: list[str]
    shapes: dict[str, tuple[torch.Size, torch.Size]]
    dtypes: dict[str, tuple[torch.dtype, torch.dtype]]
    found: dict[str, Difference]
    plain: dict[str, tuple[Any, Any]]
    kinds: list[str]
    tensors: Mapping[str, HeldTensor]
    compared: int

    def give(self, console: Console, different: bool, common: int) -> None:
        a, b = self.options.a, self.options.b
        console.give(
            {
                "different": different,
                "only_in_a": self.only_here,
                "only_in_b": self.only_there,
                "sizes": {name: [list(one), list(other)] for name, (one, other) in self.shapes.items()},
                "dtypes": {name: [dtype_name(one), dtype_name(other)] for name, (one, other) in self.dtypes.items()},
                "values": {
                    name: {
                        "elements": one.elements,
                        "of": self.tensors[name].stored.size.numel(),
                        "largest": one.largest,
                        "relative": one.relative,
                        "at": one.at,
                    }
                    for name, one in self.found.items()
                },
                "state": {name: list(pair) for name, pair in self.plain.items()},
                "tensor_in_one_value_in_the_other": self.kinds,
            }
        )
        for where, only in ((a, self.only_here), (b, self.only_there)):
            if only:
                more = f" and {len(only) - MOST_NAMES:,} more" if len(only) > MOST_NAMES else ""
                console.line(f"only in {where}: {', '.join(only[:MOST_NAMES])}{more}", "yellow")
        for name in self.kinds:
            console.line(f"{name}: a tensor in one, a value in the other", "yellow")
        rows = [[name, size_text(one, "×"), size_text(other, "×")] for name, (one, other) in self.shapes.items()]
        rows += [[name, dtype_name(one), dtype_name(other)] for name, (one, other) in self.dtypes.items()]
        if rows:
            console.table([names(), Column("A"), Column("B")], rows)
        if self.found:
            self._values(console)
        if self.plain:
            rows = [[name, repr(one), repr(other)] for name, (one, other) in self.plain.items()]
            console.table([names("value"), Column("A", wide=True), Column("B", wide=True)], rows)
        if different:
            counts = [(len(self.only_here) + len(self.only_there), "name"), (len(self.shapes), "size")]
            counts += [(len(self.dtypes), "dtype"), (len(self.found), "tensor"), (len(self.plain), "value")]
            console.line(f"{numbered(common, 'tensor')} in both, {bytes_text(self.compared)} compared")
            console.line("different: " + ", ".join(numbered(count, noun) for count, noun in counts if count), "red")
        else:
            within = "the same" if not (self.options.rtol or self.options.atol) else "the same within the tolerance"
            console.line(f"{within}: {numbered(common, 'tensor')}, {bytes_text(self.compared)}", "green")

    def _values(self, console: Console) -> None:
        largest = sorted(self.found.items(), key=lambda entry: -entry[1].largest)
        rows = []
        for name, one in largest[: max(self.options.top, 0)]:
            share = f"{one.elements / self.tensors[name].stored.size.numel():.2%}"
            where = "[" + ", ".join(map(str, one.at or [])) + "]"
            rows.append([name, f"{one.largest:.3g}", f"{one.relative:.3g}", f"{one.elements:,}", share, where])
        columns = [
            names(),
            numbers("largest |a-b|"),
            numbers("relative"),
            numbers("elements"),
            numbers(""),
            Column("at"),
        ]
        console.table(columns, rows)
        if len(largest) > len(rows):
            console.line(f"… and {numbered(len(largest) - len(rows), 'tensor')} more: --top {len(largest)}")


def _matched(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both by the names of the first; names that differ only in slashes and dots are the same."""
    dotted: dict[str, str] = {}
    for name in mine:
        dotted.setdefault(name.replace("/", "."), name)
    renamed = {}
    for name, entry in theirs.items():
        like = dotted.get(name.replace("/", "."), name)
        renamed[name if name in mine or like in theirs else like] = entry
    return dict(mine), renamed


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)
