"""What the commands have in common: how their help looks, and arguments that are numbers of bytes, names or paths."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn

from shardwise.cli.console import Console
from shardwise.viz.words import bytes_of

Run = Callable[[argparse.Namespace, Console], int]
MAX_MEMORY = "1GiB"
NARROW = 100  # columns of a help


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Help whose examples stay as they are written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=min(shutil.get_terminal_size().columns - 2, NARROW))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = re.split(r"\n(?=[ \n])|(?<=:)\n", text)  # lines that go on are one
        return "\n".join(one if one.startswith(" ") else textwrap.fill(one.strip(), width) for one in paragraphs)


class Parser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Say it, and end."""
        self.exit(2, f"shardwise: {message}; see '{self.prog} --help'\n")


def command(commands: Any, name: str, run: Run, *, says: str, more: str, examples: str) -> argparse.ArgumentParser:
    """Add a command, which has ``--json`` as all have."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=says,
        description=f"{says[0].upper()}{says[1:]}. {more}".strip(),
        epilog="examples:\n" + "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines()),
        formatter_class=Formatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, and nothing else")
    parser.set_defaults(run=run)
    return parser


def add_selection(parser: argparse.ArgumentParser, *, rename: bool = True) -> None:
    """The options that pick and rename entries."""
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only entries whose names match, * standing for anything; may be given several times",
    )
    if rename:
        parser.add_argument(
            "--rename",
            action="append",
            default=[],
            metavar="OLD=NEW",
            help="give names that match another one: each * of NEW is what that of OLD stood for; the first that "
            "matches holds",
        )


def add_memory(parser: argparse.ArgumentParser) -> None:
    """The option that bounds the memory which tensors are read into."""
    parser.add_argument(
        "--max-memory",
        type=byte_count,
        default=byte_count(MAX_MEMORY),
        metavar="BYTES",
        help=f"read so much at a time, such as 500MB or 4GiB (default: {MAX_MEMORY})",
    )


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """The option without which nothing that is there is replaced."""
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")


def byte_count(text: str) -> int:
    """A number of bytes, as people write it."""
    try:
        return bytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
