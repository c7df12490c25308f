"""``shardwise completion``: prints a script by which a shell completes commands, options and paths."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

SHELLS = ("bash", "zsh", "fish")
PATHS = {"path", "a", "b", "source", "sources", "target", "plan", "config"}  # arguments that are paths


def print_completion(
    parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser], shell: str
) -> int:
    """Print the script for a shell, and give the exit code. shtab, of the extra ``cli``, generates the script."""
    try:
        import shtab
    except ImportError:
        print("shardwise: completion needs shtab: pip install 'shardwise[cli]'", file=sys.stderr)
        return 2
    for command in commands.values():
        for action in command._actions:  # nothing public lists them
            if action.dest in PATHS:
                action.complete = shtab.FILE  # type: ignore[attr-defined] # read by shtab
    print(shtab.complete(parser, shell))
    return 0
