"""The findings as text."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator

from benchmarks.coverage.verdict import VERDICTS, WAYS, Findings

TITLES = {
    "dtensor": "DTensor",
    "shardwise": "shardwise",
    "shardwise:0": "shardwise, never gathering",
    "sharded": "ShardedOptimizer",
    "direct": "torch's optimizer",
    "direct:0": "torch's, never gathering",
}
# What is tried first and second, where it is not forward and backward.
WORDS = {"optimizers": {"forward": "values", "backward": "state"}}


def title(system: str) -> str:
    """What a system is called in the report."""
    return TITLES.get(system) or f"shardwise, gathering {system.partition(':')[2]} bytes"


def table(findings: Findings) -> Iterator[str]:
    """For each system and way, how many ops have which verdict."""
    yield f"{len(findings.results)} {findings.kind} tried, {len(findings.left_out)} left out" + _reasons(findings)
    yield ""
    width = max(len(title(system)) for system in findings.systems)
    yield " " * width + "".join(f"  {name:>9}" for name in ("", *VERDICTS, "of"))
    for system in findings.systems:
        for way in WAYS:
            counts = Counter(verdict for _, verdict, _ in verdicts(findings, system, way))
            row = [_word(findings, way), *(str(counts[verdict]) for verdict in VERDICTS), str(counts.total())]
            label = title(system) if way == WAYS[0] else ""
            yield label.ljust(width) + "".join(f"  {text:>9}" for text in row)


def verdicts(findings: Findings, system: str, way: str) -> Iterator[tuple[str, str, str]]:
    """Each op that was tried this way, its verdict and why it is not right."""
    for name, by_system in findings.results.items():
        if system in by_system and by_system[system].way(way).trials:
            tally = by_system[system].way(way)
            yield name, tally.verdict, tally.note


def worst(findings: Findings) -> Iterator[str]:
    """The names of what must not be: wrong results, ranks that diverge, gathers without a budget."""
    for system in findings.systems:
        for way in WAYS:
            for verdict in ("wrong", "diverged"):
                found = [name for name, it_is, _ in verdicts(findings, system, way) if it_is == verdict]
                yield from _named(f"{title(system)}, {_word(findings, way)}, {verdict}", found)
        gathered = [
            name for name, results in findings.results.items() if system in results and results[system].gathered
        ]
        yield from _named(f"{title(system)}, a whole operand on every rank", gathered)
        capped = [name for name, results in findings.results.items() if system in results and results[system].capped]
        yield from _named(f"{title(system)}, no time for all samples", capped)


def details(findings: Findings) -> Iterator[str]:
    """A line for each op that is not right, with the first reason; and for each that was left out."""
    for system in findings.systems:
        for way in WAYS:
            lines = [line for line in verdicts(findings, system, way) if line[1] != "right"]
            if lines:
                yield f"\n{title(system)}, {_word(findings, way)}"
            for name, verdict, note in lines:
                tally = findings.results[name][system].way(way)
                yield f"  {verdict:8}  {name} ({tally.right}/{tally.trials})  {' '.join(note.split())[:1500]}"
    if findings.left_out:
        yield "\nleft out"
    for name, reason in findings.left_out.items():
        yield f"  {name}  {' '.join(reason.split())[:200]}"


def _word(findings: Findings, way: str) -> str:
    return WORDS.get(findings.kind, {}).get(way, way)


def _reasons(findings: Findings) -> str:
    counts = Counter(reason.partition(":")[0] for reason in findings.left_out.values())
    return f" ({', '.join(f'{count} {reason}' for reason, count in counts.most_common())})" if counts else ""


def _named(what: str, found: list[str]) -> Iterator[str]:
    if found:
        yield f"\n{what} ({len(found)}):"
        yield textwrap.fill(", ".join(found), 118, initial_indent="  ", subsequent_indent="  ")
