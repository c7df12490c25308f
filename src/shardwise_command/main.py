"""`main`: parses the command line, and runs the command."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise_command.commands import make_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and give the exit code."""
    try:
        options = make_parser().parse_args(argv)
    except SystemExit as ending:  # argparse has printed the help, the version or an error
        return int(ending.code or 0)
    from shardwise.tools.cli.running import run_command  # imports torch

    return run_command(options)
