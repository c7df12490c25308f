"""`main`: runs a command, and turns its errors into exit codes.

Exit codes: 0, all is well; 1, the answer is no (`verify` found damage, `diff` differences, `doctor` a failure); 2,
wrong usage or any other error, in one line on stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from shardwise.errors import ShardwiseError
from shardwise.tools.cli import convert, diff, doctor, extract, merge, reshard, show, verify
from shardwise.tools.cli.console import Console
from shardwise.tools.cli.usage import Formatter, Parser

COMMANDS = (show, verify, diff, reshard, convert, extract, merge, doctor)
FAILED = 2

ABOUT = """\
Look at checkpoints, check, compare and rewrite them, without a model or a GPU.

A checkpoint is a folder that shardwise.save wrote; or one of Hugging Face (safetensors), torch.distributed.checkpoint
or torchsnapshot; or a file of torch.save or safetensors. It lies at a path, or at a URL such as s3://bucket/run."""

CODES = """\
exit codes: 0 all is well; 1 the answer is no (damage, differences, a failed self-test); 2 wrong usage or an error"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and give the exit code."""
    try:
        options = _parser().parse_args(argv)
    except SystemExit as ending:  # argparse has printed the help, the version or an error
        return int(ending.code or 0)
    try:
        code: int = options.run(options, Console(as_json=options.json))
        if sys.stdout is not None:  # None where stdout is closed
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return FAILED
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


def _parser() -> argparse.ArgumentParser:
    parser = Parser("shardwise", description=ABOUT, epilog=CODES, formatter_class=Formatter)
    parser.add_argument("--version", action="version", version=f"shardwise {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser


def _version() -> str:
    try:
        return version("shardwise")
    except PackageNotFoundError:  # run from source
        return "(not installed)"
