"""`python -m shardwise.dropin`: runs a script or a module with shardwise in the place of `torch.distributed._shard`."""

from __future__ import annotations

import os
import runpy
import sys

from shardwise.dropin.installation import install

USAGE = """usage: python -m shardwise.dropin script.py [argument ...]
       python -m shardwise.dropin -m module [argument ...]

Runs the script or module as Python would, with shardwise in the place of torch.distributed._shard: here, and in every
process that is started from there, such as the workers of torch.distributed.run."""


def run_with_dropin(arguments: list[str]) -> None:
    """Install the drop-in and run what is named by the first argument, or by the one after ``-m``."""
    by_name = arguments[:1] == ["-m"]
    arguments = arguments[1:] if by_name else arguments
    if not arguments or arguments[0].startswith("-"):
        asked = arguments[:1] in (["-h"], ["--help"])
        print(USAGE, file=sys.stdout if asked else sys.stderr)
        sys.exit(0 if asked else 2)
    install()
    sys.argv = arguments
    if by_name:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    run_with_dropin(sys.argv[1:])
