"""Print what one rank pays, world by world, each in a process of its own: `python -m benchmarks.scale`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from benchmarks.scale.processes import Request, measure, profile


def numbers(text: str) -> list[int]:
    return [int(word.replace("_", "")) for word in text.split(",")]


def main() -> int:
    default = Request()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--worlds", type=numbers, default=default.worlds, help="numbers of ranks: 8,512")
    parser.add_argument("--tables", type=numbers, default=default.tables, help="numbers of tables: 1000,4000")
    told = "some of chunks,grids,tables (default: all)"
    parser.add_argument("--layouts", type=lambda text: text.split(","), default=default.layouts, help=told)
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows with this in their name")
    told = "of computing for each row (default %(default)g)"
    parser.add_argument("--seconds", type=float, default=default.seconds, help=told)
    told = "of computing after which a world begins no further row (default %(default)g)"
    parser.add_argument("--world-seconds", type=float, default=default.world_seconds, help=told)
    told = "profile the first call of the rows with this in their name, in the largest of the worlds"
    parser.add_argument("--profile", metavar="TEXT", help=told)
    parser.add_argument("--later", action="store_true", help="profile a later call instead")
    options = vars(parser.parse_args())
    asked, which = options.pop("profile"), "later" if options.pop("later") else "first"
    if not set(options["layouts"]) <= set(default.layouts):
        parser.error(f"layouts are {', '.join(default.layouts)}, found {', '.join(options['layouts'])}")
    request = Request(**options)
    if asked is not None:
        return profile(replace(request, rows=asked), which)
    return 1 if measure(request) else 0


if __name__ == "__main__":
    sys.exit(main())
