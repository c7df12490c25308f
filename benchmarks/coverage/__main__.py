"""Print which of torch's ops work on sharded tensors: `make coverage-ops`."""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path

from benchmarks.coverage.report import details, table, worst
from benchmarks.coverage.survey import Survey


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    parser.add_argument("--ops", default="", help="names or patterns, with commas: add,mul,linalg.*; default: all")
    parser.add_argument("--system", choices=("shardwise", "dtensor", "all"), default="all")
    parser.add_argument("--budget", default="default,0", help="gather budgets for shardwise: default, or bytes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the shards; cuda: two NCCL ranks")
    parser.add_argument("--samples", type=int, default=12, help="at most so many calls per op (default 12)")
    parser.add_argument("--seconds", type=float, default=10.0, help="per op and system (default 10)")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--verbose", action="store_true", help="a line for each op that is not right")
    return parser.parse_args()


def systems(chosen: str, budgets: str) -> list[str]:
    """The names of the systems to try, see `benchmarks.coverage.systems.system`."""
    ours = ["shardwise" if budget == "default" else f"shardwise:{int(budget)}" for budget in budgets.split(",")]
    return {"shardwise": ours, "dtensor": ["dtensor"], "all": [*ours, "dtensor"]}[chosen]


def progress(number: int, total: int, name: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{number}/{total} {name}", end="", file=sys.stderr, flush=True)
    elif number and number % 50 == 0:
        print(f"{number}/{total} ops", file=sys.stderr, flush=True)


def main() -> int:
    """Try all ops and print the report; fails when shardwise is wrong or diverges anywhere."""
    options = arguments()
    warnings.simplefilter("ignore")  # ops under test warn of many things
    begin = time.monotonic()
    survey = Survey(systems(options.system, options.budget), options.samples, options.seconds, options.device)
    findings = survey.run([name for name in options.ops.split(",") if name], progress)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    print("\n".join(table(findings)))
    print("\n".join(worst(findings)))
    if options.verbose:
        print("\n".join(details(findings)))
    print(f"\n{time.monotonic() - begin:.0f} s")
    if options.json is not None:
        options.json.write_text(json.dumps(findings.to_json(), indent=1))
    bad = [
        name
        for name, results in findings.results.items()
        for system, result in results.items()
        if system != "dtensor" and {result.forward.verdict, result.backward.verdict} & {"wrong", "diverged"}
    ]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
