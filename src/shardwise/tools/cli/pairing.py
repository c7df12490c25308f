"""`Pairing`: which entries of two checkpoints are compared with each other, by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwise.checkpoint.name_patterns import compile_pattern
from shardwise.tools.cli.contents import Contents, HeldTensor


@dataclass(frozen=True, eq=False)
class RenamedContents:
    """The entries of one checkpoint by their names, of which some may be new."""

    entries: Mapping[str, Any]  # a `HeldTensor`, or a plain value
    old_names: Mapping[str, str]  # by name: the name in the checkpoint

    @staticmethod
    def of(contents: Contents, rules: Sequence[str]) -> RenamedContents:
        """The contents, renamed by those of the rules that match."""
        renamed = contents.renamed(rules, need_match=False)
        entries = {**renamed.by_name, **renamed.values_by_name}
        return RenamedContents(entries, dict(zip(entries, (*contents.by_name, *contents.values_by_name), strict=True)))

    def called(self, name: str) -> tuple[str, str]:
        """The new name and the old one."""
        return name, self.old_names[name]

    def tensors(self, names: Iterable[str]) -> dict[str, HeldTensor]:
        """Those of the entries with these names that are tensors."""
        return {name: self.entries[name] for name in names if isinstance(self.entries[name], HeldTensor)}


@dataclass(frozen=True, eq=False)
class Pairing:
    """The entries of A and B, by their names in A where both have them. Names that differ in dots and slashes match."""

    a: RenamedContents
    b: RenamedContents
    partners: Mapping[str, str]  # from names in A to names in B
    left_out: tuple[int, int]  # entries of A and of B that ``only`` leaves out
    alone: tuple[list[str], list[str]]  # entries that only A has, and only B

    @staticmethod
    def of(a: RenamedContents, b: RenamedContents, only: Sequence[str]) -> Pairing:
        """Match the entries. With ``only``, those that match one of the patterns by any of their names."""
        rules = list(map(compile_pattern, only))

        def chosen(*names: str) -> bool:
            return not rules or any(rule.fullmatch(name) for rule in rules for name in names)

        partners = _partners(a.entries, b.entries)
        taken = set(partners.values())
        kept = {one: other for one, other in partners.items() if chosen(*a.called(one), *b.called(other))}
        alone = (
            [name for name in a.entries if name not in partners and chosen(*a.called(name))],
            [name for name in b.entries if name not in taken and chosen(*b.called(name))],
        )
        counts = [len(side.entries) - len(kept) - len(own) for side, own in zip((a, b), alone, strict=True)]
        return Pairing(a, b, kept, (counts[0], counts[1]), alone)

    @cached_property
    def tensors(self) -> dict[str, tuple[HeldTensor, HeldTensor]]:
        """The tensors that both have."""
        mine, theirs = self.a.tensors(self.partners), self.b.tensors(self.partners.values())
        return {a: (mine[a], theirs[b]) for a, b in self.partners.items() if a in mine and b in theirs}

    @cached_property
    def values(self) -> dict[str, tuple[Any, Any]]:
        """The plain values that both have."""
        pairs = {one: (self.a.entries[one], self.b.entries[other]) for one, other in self.partners.items()}
        return {name: pair for name, pair in pairs.items() if not any(isinstance(one, HeldTensor) for one in pair)}

    @property
    def mixed(self) -> list[str]:
        """Entries that are tensors on one side and plain values on the other."""
        return [name for name in self.partners if name not in self.tensors and name not in self.values]

    @cached_property
    def tied(self) -> tuple[dict[str, str], dict[str, str]]:
        """Further names, on one side only, of tensors that both have: for each, a name that both have."""
        both = self.a.tensors(self.partners), self.b.tensors(self.partners.values())
        found = []
        for side, shared, names in zip((self.a, self.b), both, self.alone, strict=True):
            by_tensor = {id(held.stored): name for name, held in shared.items()}
            alone = side.tensors(names)
            found.append({n: by_tensor[id(held.stored)] for n, held in alone.items() if id(held.stored) in by_tensor})
        return found[0], found[1]

    @property
    def only(self) -> tuple[list[str], list[str]]:
        """Entries that are on one side only, without further names of tied tensors."""
        (a, b), (tied_a, tied_b) = self.alone, self.tied
        return [name for name in a if name not in tied_a], [name for name in b if name not in tied_b]

    def common_prefix(self) -> tuple[str, str, int] | None:
        """The side ('a' or 'b') whose names have a prefix that the other side's have not, the prefix, and how many."""
        a, b = self.only
        found = [(*_prefix(long, short), which) for which, long, short in (("a", a, b), ("b", b, a))]
        count, prefix, which = max(found)
        return (which, prefix, count) if count else None


def _partners(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, str]:
    """From names in A to those in B: the same name, or else one that differs in dots and slashes only."""
    rest = {name.replace("/", "."): name for name in reversed(list(b)) if name not in a}
    found = {}
    for name in a:
        other = name if name in b else rest.pop(name.replace("/", "."), None)
        if other is not None:
            found[name] = other
    return found


def _prefix(long: Sequence[str], short: Sequence[str]) -> tuple[int, str]:
    """How many of the short names are those of the long ones without a prefix, and the prefix."""
    known, counts = set(short), Counter[str]()
    for name in long:
        ends = [k for k, letter in enumerate(name) if letter in "/."]
        counts.update({name[: k + 1] for k in ends if name[k + 1 :] in known})
    return max(((count, prefix) for prefix, count in counts.items()), default=(0, ""))
