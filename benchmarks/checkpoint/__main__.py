"""Print the tables of checkpoints alone."""

from __future__ import annotations

import sys

from benchmarks.checkpoint.report import measure


def main() -> int:
    over = [row.work for row in measure() if row.verdict == "OVER"]
    print(f"\nover budget: {', '.join(over)}" if over else "\nevery budget is held")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
