"""What is read as a whole: never more than anybody would have written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import shardwise
from shardwise.checkpoint.storage import LocalStorage
from shardwise.checkpoint.storage.protocol import read_range
from shardwise.errors import CheckpointError


def test_files_that_say_they_are_huge(tmp_path: Path) -> None:
    """An index of a tebibyte of zeros is not read into memory; nor is what lies beyond the end of a file."""
    shardwise.save({"weight": torch.zeros(3)}, tmp_path)
    os.truncate(tmp_path / "index.json", 2**40)
    with pytest.raises(CheckpointError, match=r"'index\.json' of .* at most 2,147,483,648 are read"):
        shardwise.load({"weight": torch.zeros(3)}, tmp_path)
    (tmp_path / "small").write_bytes(b"abc")
    file = LocalStorage(tmp_path).open("small")
    assert read_range(file, 1, 2) == b"bc"
    for begin, length in ((1, 2**50), (-1, 2), (2, -1)):
        with pytest.raises(CheckpointError, match="beyond the end of the file, at 3"):
            read_range(file, begin, length)
    file.close()
