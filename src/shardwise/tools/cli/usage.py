"""What commands share: the format of their help, common options, and checks of the target that they write to."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from shardwise.checkpoint.archive.index_file import INDEX
from shardwise.checkpoint.storage import LocalStorage, storage_at
from shardwise.checkpoint.storage.at import URL
from shardwise.layout.pictures.words import parse_bytes
from shardwise.tools.cli.console import Console
from shardwise.tools.cli.contents import UsageError

Run = Callable[[argparse.Namespace, Console], int]
MAX_MEMORY = "1GiB"
NARROW = 100  # columns of a help


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Help with examples that are not reformatted."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=min(shutil.get_terminal_size().columns - 2, NARROW))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = re.split(r"\n(?=[ \n])|(?<=:)\n", text)  # joins the lines of a paragraph
        return "\n".join(one if one.startswith(" ") else textwrap.fill(one.strip(), width) for one in paragraphs)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit."""
        self.exit(2, f"shardwise: {message}; see '{self.prog} --help'\n")


def command(commands: Any, name: str, run: Run, *, says: str, more: str, examples: str) -> argparse.ArgumentParser:
    """Add a command, with ``--json``."""
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
    """Add the options that select and rename entries."""
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


def require_free_target(
    path: str, sources: list[str], *, folder: bool, own: bool = False, overwrite: bool = False
) -> None:
    """Raise unless a file or folder can be written at ``path``, which must not be one of the sources.

    With ``overwrite``, a file or (with ``own``) a checkpoint of shardwise may be replaced.
    """
    for source in sources:
        if _same(path, source) or (folder and _same(path, os.path.dirname(source))):
            raise UsageError(f"'{path}' is what is read: write to another place")
    if folder:
        _require_folder(path, own=own, overwrite=overwrite)
    elif URL.match(path):
        parent, _, name = path.rpartition("/")
        if name in storage_at(parent).names() and not overwrite:
            raise UsageError(f"'{path}' is there: --overwrite replaces it")
    else:
        target = Path(path)
        if target.is_dir():
            raise UsageError(f"'{path}' is a folder, and a file is to be written: give the name of one")
        if not target.absolute().parent.is_dir():
            raise UsageError(f"there is no folder '{target.absolute().parent}' to write '{target.name}' to")
        if target.exists() and not overwrite:
            raise UsageError(f"'{path}' is there: --overwrite replaces it")


def _require_folder(path: str, *, own: bool, overwrite: bool) -> None:
    storage = storage_at(path)
    if isinstance(storage, LocalStorage) and storage.path.exists() and not storage.path.is_dir():
        raise UsageError(f"'{path}' is a file, and a folder is to be written")
    names = storage.names()
    if not names and not storage.folders():
        return
    if not own:
        raise UsageError(f"'{path}' is not empty: write to another folder, or empty it first")
    if INDEX in names and not overwrite:
        raise UsageError(f"there is a checkpoint at '{path}': --overwrite replaces it")
    if INDEX not in names:
        raise UsageError(f"'{path}' holds something else, no checkpoint: write to another folder")


def _same(one: str, other: str) -> bool:
    if URL.match(one) or URL.match(other):
        return one.rstrip("/") == other.rstrip("/")
    return os.path.realpath(one) == os.path.realpath(other)
