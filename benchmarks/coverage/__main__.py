"""Print which of torch's ops, modules and optimizers work on sharded tensors: `make coverage-ops`."""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path

from benchmarks.coverage.report import details, table, worst
from benchmarks.coverage.survey import KINDS, Survey
from benchmarks.coverage.verdict import Findings


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    for kind, example in (("ops", "add,linalg.*"), ("modules", "nn.LSTM,Conv*"), ("optimizers", "Adam*")):
        told = f"only {kind} that fit these names or patterns, with commas: {example}; default: everything there is"
        parser.add_argument(f"--{kind}", metavar="NAMES", help=told)
    parser.add_argument("--system", choices=("shardwise", "dtensor", "all"), default="all")
    parser.add_argument("--budget", default="default,0", help="gather budgets for shardwise: default, or bytes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the shards; cuda: two NCCL ranks")
    parser.add_argument("--samples", type=int, default=12, help="at most so many calls per op (default 12)")
    parser.add_argument("--seconds", type=float, default=10.0, help="per op and system (default 10)")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--verbose", action="store_true", help="a line for each op that is not right")
    return parser.parse_args()


def systems(kind: str, chosen: str, budgets: str) -> list[str]:
    """The names of the systems to try: ours with each gather budget; DTensor with ops only."""
    limits = ["" if budget == "default" else f":{int(budget)}" for budget in budgets.split(",")]
    if kind == "optimizers":
        return ["sharded", *(f"direct{limit}" for limit in limits)]
    ours = [f"shardwise{limit}" for limit in limits]
    return ours if kind == "modules" else {"shardwise": ours, "dtensor": ["dtensor"], "all": [*ours, "dtensor"]}[chosen]


def progress(number: int, total: int, name: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{number}/{total} {name}", end="", file=sys.stderr, flush=True)
    elif number and number % 50 == 0:
        print(f"{number}/{total}", file=sys.stderr, flush=True)


def main() -> int:
    """Try everything and print the report; fails when shardwise is wrong or diverges anywhere."""
    options = arguments()
    warnings.simplefilter("ignore")  # ops under test warn of many things
    asked = {kind: getattr(options, kind) for kind in KINDS if getattr(options, kind) is not None}
    found = {kind: survey(kind, names, options) for kind, names in (asked or dict.fromkeys(KINDS, "")).items()}
    if options.json is not None:
        options.json.write_text(json.dumps({kind: one.to_json() for kind, one in found.items()}, indent=1))
    bad = [
        name
        for findings in found.values()
        for name, results in findings.results.items()
        for system, result in results.items()
        if system != "dtensor" and {result.forward.verdict, result.backward.verdict} & {"wrong", "diverged"}
    ]
    return 1 if bad else 0


def survey(kind: str, names: str, options: argparse.Namespace) -> Findings:
    """Try one kind of things and print what was found."""
    begin = time.monotonic()
    chosen = systems(kind, options.system, options.budget)
    made = Survey(chosen, options.samples, options.seconds, options.device, kind)
    findings = made.run([name for name in names.split(",") if name], progress)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    print("\n".join(table(findings)))
    print("\n".join(worst(findings)))
    if options.verbose:
        print("\n".join(details(findings)))
    print(f"\n{time.monotonic() - begin:.0f} s\n", flush=True)
    return findings


if __name__ == "__main__":
    sys.exit(main())
