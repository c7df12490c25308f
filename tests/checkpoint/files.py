"""Files of a checkpoint as they lie, and indexes that say something else than was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.checkpoint.archive.blocks import checksum
from shardwise.checkpoint.archive.index_file import INDEX


def file_of(folder: Path, rank: int) -> Path:
    """The file that a rank has written; there must be one."""
    (found,) = folder.glob(f"rank-{rank:05d}.*.safetensors")
    return found


def with_sum(words: Any) -> bytes:
    """An index that says this, with a checksum that fits, as somebody may write it who means harm."""
    return summed(json.dumps({key: value for key, value in words.items() if key != "sum"}))


def summed(text: str) -> bytes:
    """The same of words that are text already, an object."""
    return f'{text[:-1]},\n "sum": "{checksum(text[:-1].encode()):016x}"\n}}'.encode()


def rewrite(folder: Path, change: Callable[[Any], Any]) -> None:
    """Change what an index says; its checksum then fits again."""
    words = json.loads((folder / INDEX).read_text())
    changed = change(words)
    (folder / INDEX).write_bytes(with_sum(words if changed is None else changed))


def edit(folder: Path, *keys: str | int, value: Any) -> None:
    """Change one entry of an index."""

    def change(words: Any) -> None:
        for key in keys[:-1]:
            words = words[key]
        words[keys[-1]] = value

    rewrite(folder, change)
