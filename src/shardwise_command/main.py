"""`main`: parses the command line, and runs the command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from shardwise_command.commands import make_parser
from shardwise_command.completion import print_completion
from shardwise_command.suggestions import require_known_words


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and give the exit code."""
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv))
        if sys.stdout is not None:  # None where stdout is closed
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 2


def _run(words: Sequence[str]) -> int:
    parser, commands = make_parser()
    try:
        require_known_words(parser, commands, words)
        options = parser.parse_args(words)
    except SystemExit as ending:  # argparse has printed the help, the version or an error
        return int(ending.code or 0)
    if options.command == "completion":
        return print_completion(parser, commands, options.shell)
    from shardwise.tools.cli.running import run_command  # imports torch

    return run_command(options)
