"""``shardwise diff``: compares the names, sizes, dtypes and values of two checkpoints."""

from __future__ import annotations

import argparse
import math
from functools import cached_property
from typing import Any

from shardwise.checkpoint.archive import open_archive
from shardwise.checkpoint.archive.stored import dtype_name
from shardwise.layout.pictures.words import bytes_text, numbered, size_text
from shardwise.tools.cli.console import Column, Console, names, numbers
from shardwise.tools.cli.contents import Contents, HeldTensor, require_matches, require_rename_rules, tensors_text
from shardwise.tools.cli.pairing import Pairing, RenamedContents
from shardwise.tools.cli.tensor_difference import Difference, compare

MOST_NAMES = 12  # listed of those on one side only


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command."""
    with open_archive(options.a) as first, open_archive(options.b) as second:
        whole = Contents.of(first), Contents.of(second)
        parts = whole[0].selected(options.only_a), whole[1].selected(options.only_b)
        require_matches(whole, options.only)
        require_rename_rules(parts, options.rename)
        for contents, rules in zip(parts, (options.rename_a, options.rename_b), strict=True):
            require_rename_rules([contents], rules)
        a, b = (
            RenamedContents.of(contents, [*own, *options.rename])
            for contents, own in zip(parts, (options.rename_a, options.rename_b), strict=True)
        )
        report = _Report(options, Pairing.of(a, b, options.only))
        with console.progress("comparing", report.nbytes) as on_read:
            for pair in report.distinct:
                found = compare(*pair, options.rtol, options.atol, options.max_memory, on_read)
                report.differences[_key(pair)] = found
        report.left_out = tuple(
            len(before.tensors) + len(before.values) - len(after.tensors) - len(after.values) + more
            for before, after, more in zip(whole, parts, report.pairing.left_out, strict=True)
        )
    report.give(console)
    return int(report.is_different)


def _key(pair: tuple[HeldTensor, HeldTensor]) -> tuple[int, int]:
    """The same for tied names of both sides."""
    return id(pair[0].stored), id(pair[1].stored)


class _Report:
    """The differences, and how they are printed."""

    def __init__(self, options: argparse.Namespace, pairing: Pairing) -> None:
        self.options, self.pairing = options, pairing
        self.differences: dict[tuple[int, int], Difference] = {}
        self.left_out: tuple[int, ...] = (0, 0)
        pairs = {name: (one.stored, other.stored) for name, (one, other) in pairing.tensors.items()}
        self.sizes = {name: (one.size, two.size) for name, (one, two) in pairs.items() if one.size != two.size}
        self.dtypes = {name: (one.dtype, two.dtype) for name, (one, two) in pairs.items() if one.dtype != two.dtype}
        self.state = {name: pair for name, pair in pairing.values.items() if not _same(*pair)}

    @cached_property
    def distinct(self) -> list[tuple[HeldTensor, HeldTensor]]:
        """The pairs of tensors whose values are compared, each once."""
        pairs = [pair for name, pair in self.pairing.tensors.items() if name not in self.sizes]
        return list({_key(pair): pair for pair in pairs}.values())

    @property
    def nbytes(self) -> int:
        """The bytes of A that are compared."""
        return sum(mine.stored.nbytes for mine, _ in self.distinct)

    @cached_property
    def values(self) -> dict[str, Difference]:
        """The tensors whose values differ, in order: weights before counters, and by relative difference."""
        pairs = {name: pair for name, pair in self.pairing.tensors.items() if name not in self.sizes}
        found = {name: self.differences[_key(pair)] for name, pair in pairs.items()}
        different = {name: one for name, one in found.items() if one.elements}
        order = sorted(different, key=lambda name: (_is_counter(pairs[name][0].stored), -different[name].relative))
        return {name: different[name] for name in order}

    @property
    def is_different(self) -> bool:
        """Whether anything is."""
        return any((*self.pairing.only, self.sizes, self.dtypes, self.values, self.state, self.pairing.mixed))

    def give(self, console: Console) -> None:
        """Print everything."""
        (only_a, only_b), (tied_a, tied_b) = self.pairing.only, self.pairing.tied
        console.give(
            {
                "different": self.is_different,
                "only_in_a": only_a,
                "only_in_b": only_b,
                "tied_only_in_a": tied_a,
                "tied_only_in_b": tied_b,
                "left_out_of_a": self.left_out[0],
                "left_out_of_b": self.left_out[1],
                "sizes": {name: [list(one), list(other)] for name, (one, other) in self.sizes.items()},
                "dtypes": {name: [dtype_name(one), dtype_name(other)] for name, (one, other) in self.dtypes.items()},
                "values": {
                    name: {
                        "elements": one.elements,
                        "of": self._numel(name),
                        "largest": one.largest,
                        "relative": one.relative,
                        "at": one.at,
                    }
                    for name, one in self.values.items()
                },
                "state": {name: list(pair) for name, pair in self.state.items()},
                "tensor_in_one_value_in_the_other": self.pairing.mixed,
            }
        )
        paths = self.options.a, self.options.b
        for path, only in zip(paths, self.pairing.only, strict=True):
            if only:
                console.listing(f"only in {path}, {numbered(len(only), 'name')}:", only, MOST_NAMES)
        for name in self.pairing.mixed:
            console.line(f"{name}: a tensor in one, a value in the other", "yellow")
        rows = [[name, size_text(one, "×"), size_text(other, "×")] for name, (one, other) in self.sizes.items()]
        rows += [[name, dtype_name(one), dtype_name(other)] for name, (one, other) in self.dtypes.items()]
        if rows:
            console.table([names(), Column("A"), Column("B")], rows)
        if self.values:
            self._print_values(console)
        if self.state:
            rows = [[name, repr(one), repr(other)] for name, (one, other) in self.state.items()]
            console.table([names("value"), Column("A", wide=True), Column("B", wide=True)], rows)
        self._print_remarks(console)
        self._print_result(console)

    def _numel(self, name: str) -> int:
        return self.pairing.tensors[name][0].stored.size.numel()

    def _print_values(self, console: Console) -> None:
        shown = dict(list(self.values.items())[: max(self.options.top, 0)])
        rows = []
        for name, one in shown.items():
            share = f"{one.elements / self._numel(name):.2%}"
            where = "[" + ", ".join(map(str, one.at or [])) + "]"
            rows.append([name, f"{one.relative:.3g}", f"{one.largest:.3g}", f"{one.elements:,}", share, where])
        columns = [names(), numbers("relative"), numbers("largest |a-b|")]
        console.table([*columns, numbers("elements"), numbers(""), Column("at")], rows)
        rest = [one for name, one in self.values.items() if name not in shown]
        if rest:
            largest = max(one.relative for one in rest)
            words = f"{numbered(len(rest), 'tensor')} more, of relative difference {largest:.3g} at most"
            console.line(f"… and {words}: --top {len(self.values)} shows all")

    def _print_remarks(self, console: Console) -> None:
        """Names that were not compared, and why."""
        paths = self.options.a, self.options.b
        for path, tied in zip(paths, self.pairing.tied, strict=True):
            if tied:
                known = [f"{name} (tied to {other})" for name, other in tied.items()]
                console.listing(f"tied in {path}, and under one name in the other:", known, MOST_NAMES, "")
        parts = [f"{numbered(n, 'name')} of {path}" for n, path in zip(self.left_out, paths, strict=True) if n]
        if parts:
            console.line(f"left out, as --only says: {', '.join(parts)}")
        near = self.pairing.common_prefix()
        if near is not None:
            which, prefix, count = near
            console.line(
                f"{numbered(count, 'name')} would match without '{prefix}': "
                f"--only-{which} '{prefix}*' --rename-{which} '{prefix}*=*'"
            )

    def _print_result(self, console: Console) -> None:
        common = self.pairing.tensors
        count = tensors_text(len({_key(pair) for pair in common.values()}), len(common))
        if self.is_different:
            only = sum(map(len, self.pairing.only))
            counts = [(only, "name"), (len(self.sizes), "size"), (len(self.dtypes), "dtype")]
            words = [numbered(count, noun) for count, noun in counts if count]
            words += [tensors_text(len({_key(common[name]) for name in self.values}), len(self.values))] * bool(
                self.values
            )
            counts = [(len(self.state), "value"), (len(self.pairing.mixed), "kind")]
            words += [numbered(count, noun) for count, noun in counts if count]
            console.line(f"in both: {count}; {bytes_text(self.nbytes)} compared")
            console.line("different: " + ", ".join(words), "red")
        else:
            within = "the same" if not (self.options.rtol or self.options.atol) else "the same within the tolerance"
            console.line(f"{within}: {count}, {bytes_text(self.nbytes)}", "green")


def _is_counter(stored: Any) -> bool:
    """Whether a tensor counts something, as the steps of an optimizer do: integers, and scalars."""
    is_number = stored.dtype.is_floating_point or stored.dtype.is_complex
    return not is_number or not stored.size


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)
