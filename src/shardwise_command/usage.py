"""What commands share: the format of their help, and common options."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from typing import Any, NoReturn

from shardwise_command.byte_counts import parse_bytes

MAX_MEMORY = "1GiB"
NARROW = 100  # columns of a help


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Help with examples that are not reformatted."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=min(shutil.get_terminal_size().columns - 2, NARROW))
        self._action_max_length = 14  # room for every command: argparse does not count how far they are indented

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = re.split(r"\n(?=[ \n])|(?<=:)\n", text)  # joins the lines of a paragraph
        return "\n".join(one if one.startswith(" ") else textwrap.fill(one.strip(), width) for one in paragraphs)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit."""
        see = " See" if message.endswith("?") else "; see"
        self.exit(2, f"shardwise: {message}{see} '{self.prog} --help'\n")


def command(
    commands: Any, name: str, *, says: str, more: str, examples: str, json: bool = True
) -> argparse.ArgumentParser:
    """Add a command, with ``--json`` unless it has no answer to print so."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=says,
        description=f"{says[0].upper()}{says[1:]}. {more}".strip(),
        epilog="examples:\n" + "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines()),
        formatter_class=Formatter,
    )
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON on stdout, and nothing else")
    parser.set_defaults(command=name)
    return parser


def add_selection(parser: argparse.ArgumentParser, *, rename: bool = True, of: str = "", suffix: str = "") -> None:
    """Add the options that select and rename entries; ``of`` says of which checkpoint, where there are two."""
    more = ", * standing for anything; may be given several times" if not suffix else ""
    parser.add_argument(
        f"--only{suffix}",
        action="append",
        default=[],
        metavar="PATTERN",
        help=f"only entries{of} whose names match{more}",
    )
    if rename:
        more = ": each * of NEW is what that of OLD stood for; the first that matches holds" if not suffix else ""
        parser.add_argument(
            f"--rename{suffix}",
            action="append",
            default=[],
            metavar="OLD=NEW",
            help=f"give names{of} that match another one{more}",
        )


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Add the option that bounds the memory for tensors."""
    parser.add_argument(
        "--max-memory",
        type=byte_count,
        default=byte_count(MAX_MEMORY),
        metavar="BYTES",
        help=f"read so much at a time, such as 500MB or 4GiB (default: {MAX_MEMORY})",
    )


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Add the option that allows replacing what exists."""
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")


def byte_count(text: str) -> int:
    """A number of bytes from a text such as 4GiB."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
