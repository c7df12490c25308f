"""Tries every op, each as a task of its own, and goes on with new ranks where some hung, died or diverged."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.coverage import layouts
from benchmarks.coverage.module_ranks import module_names, try_module
from benchmarks.coverage.optimizer_ranks import optimizer_names, try_optimizer
from benchmarks.coverage.ranks import all_names, try_op
from benchmarks.coverage.verdict import Findings, OpResult
from shardwise.testing import RankFailure, pool, run_on_ranks

LIMIT = 1800.0  # seconds for an op on all systems; a rank that hangs is ended long before by its watch
DATABASE = "benchmarks.coverage.loaded"


@dataclass(frozen=True)
class Kind:
    """A kind of things to try: how many ranks try it, how its names are found, and what each rank does for one."""

    ranks: int
    names: Callable[[list[str]], list[str]]
    attempt: Callable[[str, list[str], str, int, float, str], None]


KINDS = {
    "ops": Kind(2, all_names, try_op),
    "modules": Kind(layouts.WORLD_SIZE, module_names, try_module),
    "optimizers": Kind(layouts.WORLD_SIZE, optimizer_names, try_optimizer),
}


@dataclass(frozen=True)
class Survey:
    """What to try: at most so many samples per op, for about so many seconds per op and system."""

    systems: list[str]
    most: int
    seconds: float
    device: str = "cpu"
    kind: str = "ops"

    def run(self, patterns: list[str], progress: Callable[[int, int, str], None]) -> Findings:
        """Try every op that fits a pattern."""
        if DATABASE not in pool.PRELOADED and self.device == "cpu":  # loading it starts CUDA, which cannot be forked
            pool.PRELOADED.append(DATABASE)  # then new ranks need not load it
        findings = Findings(self.systems, self.kind)
        names: list[str] = self._on_ranks(KINDS[self.kind].names, patterns, timeout=180)[0]
        if not names:
            raise SystemExit(f"torch's database of {self.kind} has none that fits {', '.join(patterns)}")
        for number, name in enumerate(names):
            progress(number, len(names), name)
            self._try(name, findings)
        return findings

    def _try(self, name: str, findings: Findings) -> None:
        """Try an op on every system; after a failure of the ranks, on those that are left."""
        left = list(self.systems)
        while left:
            with tempfile.TemporaryDirectory(prefix="shardwise-coverage-") as folder:
                failure = self._attempt(name, left, folder)
                records = _records(Path(folder))
                reason = next((record["left_out"] for record in records if "left_out" in record), None)
                if reason is None and not any("system" in record for record in records):
                    reason = f"the ranks failed before any trial: {failure}"
                if reason is not None:
                    findings.left_out[name] = reason
                    return
                results = findings.results.setdefault(name, {})
                for system in left:
                    found = [record for record in records if record.get("system") == system]
                    if found:
                        results[system] = _result(found, _last_words(failure, Path(folder)))
                left = [system for system in left if system not in results]

    def _attempt(self, name: str, systems: list[str], folder: str) -> str:
        """Run the op on the ranks; give what went wrong with them, if anything did."""
        try:
            self._on_ranks(
                KINDS[self.kind].attempt, name, systems, folder, self.most, self.seconds, self.device, timeout=LIMIT
            )
        except RankFailure as error:
            return str(error)
        return ""

    def _on_ranks(self, function: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
        backend = "nccl" if self.device == "cuda" else "gloo"
        return run_on_ranks(KINDS[self.kind].ranks, function, *args, timeout=timeout, backend=backend)


def _records(folder: Path) -> list[dict[str, Any]]:
    journal = folder / "journal"
    return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []


def _result(records: list[dict[str, Any]], failure: str) -> OpResult:
    """What the journal says about one system; a trial that began and did not end has diverged."""
    result, open_way, where = OpResult(), "", ""
    for record in records:
        open_way = record.get("begins", "")
        if "cut" in record:
            where = f"of ({record['of']}), {record['cut']}"
        if "verdict" in record:
            result.way(record["way"]).add(record["verdict"], f"{where}: {record['note']}")
            if record["way"] == "forward":  # a gradient may well be spread to all
                result.gathered.update(tuple(size) for size in record["gathered"])
        result.capped += record.get("capped", 0)
        result.seconds += record.get("seconds", 0.0)
    if open_way:
        result.way(open_way).add("diverged", f"{where}: {failure}")
    return result


def _last_words(failure: str, folder: Path) -> str:
    """What is known about the rank that hung or died."""
    hung = [f"rank {file.name.removeprefix('hung-')} {file.read_text()}" for file in sorted(folder.glob("hung-*"))]
    if hung:
        return "; ".join(hung)
    lines = [line.strip() for line in failure.splitlines() if line.strip()]
    telling = [line for line in lines if "exit code" in line or "did not finish" in line]
    where = [line.removeprefix("File ") for line in lines if line.startswith("File ")]  # of a crash, innermost first
    return "; ".join([*telling, *where[:8]] if telling else lines[-2:])[:1200]
