"""`run_command`: runs a command, and turns its errors into exit codes.

Exit codes: 0, all is well; 1, the answer is no (`verify` found damage, `diff` differences, `plan` nothing that fits,
`doctor` a failure); 2, wrong usage or any other error, in one line on stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from shardwise.errors import ShardwiseError
from shardwise.tools.cli import convert, diff, doctor, estimate, extract, merge, plan, reshard, show, verify
from shardwise.tools.cli.console import Console

COMMANDS: dict[str, Callable[[argparse.Namespace, Console], int]] = {
    "inspect": show.run,
    "verify": verify.run,
    "diff": diff.run,
    "reshard": reshard.run,
    "convert": convert.run,
    "extract": extract.run,
    "merge": merge.run,
    "plan": plan.run,
    "estimate": estimate.run,
    "doctor": doctor.run,
}
FAILED = 2


def run_command(options: argparse.Namespace) -> int:
    """Run the command that was parsed, and give the exit code."""
    try:
        return COMMANDS[options.command](options, Console(as_json=options.json))
    except BrokenPipeError:  # which ends every command alike
        raise
    except KeyboardInterrupt:
        return _failed("interrupted")
    except (ShardwiseError, OSError, MemoryError, ValueError, RuntimeError) as error:
        if os.environ.get("SHARDWISE_TRACEBACK"):
            raise
        return _failed(_one_line(error))


def _failed(why: str) -> int:
    print(f"shardwise: {why}", file=sys.stderr)
    return FAILED


def _one_line(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "not enough memory: give a smaller --max-memory"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: '{error.filename}'" if error.filename else error.strerror
    message = " ".join(str(error).split()) or type(error).__name__
    expected = isinstance(error, ShardwiseError | ValueError)
    return message if expected else f"{message} ({type(error).__name__}; SHARDWISE_TRACEBACK=1 shows where)"
