"""Files that somebody has damaged, or written on purpose: a `CheckpointError` at once, and never anything else."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.files import file_of, rewrite, summed
from tests.checkpoint.fuzz import Fuzz, save_both
from tests.checkpoint.hostile import all_mutants, require_told, save_small

import shardwise
from shardwise.checkpoint import read_index
from shardwise.checkpoint.archive.index_file import INDEX
from shardwise.errors import CheckpointError


def test_no_damage_passes_unseen(tmp_path: Path) -> None:
    """Of 300 flipped bits, lost pages, cut, swapped and mixed files, all are told with the file, and those in tensors
    with the tensor and the box; ``python -m tests.checkpoint.fuzz`` tries as many as one likes."""
    save_both(tmp_path)
    fuzz, dice = Fuzz(tmp_path), random.Random(17)
    for _ in range(300):
        fuzz.try_one(dice)
    fuzz.require_whole()


def test_words_that_nobody_wrote(tmp_path: Path) -> None:
    """Words of an index or a header replaced by others, with checksums that fit: refused, or it makes sense, and no
    other error comes; ``python -m tests.checkpoint.hostile`` tries all of them."""
    save_small(tmp_path)
    for what, files in random.Random(17).sample(list(all_mutants(tmp_path)), 600):
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        require_told(tmp_path, what)


def nested(depth: int) -> str:
    """A list in a list, so often."""
    return '{"list": [' * depth + "]}" * depth


def with_state(words: Any, text: str) -> bytes:
    """An index whose state is this text."""
    inner = {key: value for key, value in words.items() if key not in ("state", "sum")}
    return summed(f'{json.dumps(inner)[:-1]}, "state": {text}}}')


HOSTILE: dict[str, Callable[[Any], None]] = {
    "overlapping boxes": lambda words: (
        words["tensors"].update(
            a={"dtype": "uint8", "size": [10**6], "on": 1, "boxes": [[k, 500] for k in range(100_000)]}
        )
        or words["places"].__setitem__(slice(1, None), [{"files": [0] * 100_000}])
    ),
    "boxes that all overlap in two dims": lambda words: (
        words["tensors"].update(
            a={"dtype": "uint8", "size": [10**5, 10**5], "on": 1, "boxes": [[k, 0, 2, 10**5] for k in range(20_000)]}
        )
        or words["places"].__setitem__(slice(1, None), [{"files": [0] * 20_000}])
    ),
    "a grid of too many": lambda words: words["tensors"]["grid"].update(axes=[[10**12, 0, 0, 1]]),
    "steps beyond": lambda words: words["tensors"]["grid"].update(axes=[[2, 0, 0, 2**61]]),
    "more files than there are": lambda words: words["places"].__setitem__(0, [0, 10**12]),
    "a tensor of 10^18": lambda words: words["tensors"]["a"].update(size=[10**9, 10**9]),
    "a file of 10^18": lambda words: (
        words["tensors"]["a"].update(size=[10**9, 10**9]) or words["files"][0].__setitem__(1, 10**19)
    ),
    "a file twice": lambda words: words["files"].append(words["files"][0]),
    "a dtype that is a module": lambda words: words["tensors"]["a"].update(dtype="_dynamo"),  # getattr would import it
    "a dtype that is a package": lambda words: words["tensors"]["a"].update(dtype="testing"),
    "a dtype that is a function": lambda words: words["tensors"]["a"].update(dtype="load"),
    "an int of many digits": lambda words: words.update(state={"int": "f" * 10**6 + "g"}),
}


def test_indexes_that_mean_harm(tmp_path: Path) -> None:
    """Many overlapping boxes, numbers beyond all bounds, deep nests, names of modules: refused at once."""
    save_small(tmp_path)
    before = (tmp_path / INDEX).read_bytes()
    words = json.loads(before)
    for what, change in HOSTILE.items():
        (tmp_path / INDEX).write_bytes(before)
        rewrite(tmp_path, change)
        require_told(tmp_path, what, refused=True)
    for depth in (400, 100_000):
        (tmp_path / INDEX).write_bytes(with_state(words, nested(depth)))
        require_told(tmp_path, f"a nest of {depth}", refused=True)
    for text in (b"", b"{}", b"null", b"[" * 100_000, b'{"format": "shardwise checkpoint", "version": 2}', b"1" * 9999):
        (tmp_path / INDEX).write_bytes(text)
        require_told(tmp_path, repr(text[:60]), refused=True)


def test_what_is_saved_can_be_loaded_however_deep(tmp_path: Path) -> None:
    """A state that is nested too deep is refused when it is saved; one less deep comes back."""
    state: Any = 7
    for _ in range(100):
        state = [state]
    shardwise.save(state, tmp_path / "deep")
    assert read_index(tmp_path / "deep").state == state
    assert shardwise.load(None, tmp_path / "deep") == state
    with pytest.raises(CheckpointError, match="nested deeper than 100"):
        shardwise.save([state], tmp_path / "deeper")
    assert os.listdir(tmp_path) == ["deep"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
def test_something_else_under_the_name_of_a_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """Is neither waited for nor read."""
    save_small(tmp_path / "a")
    file = file_of(tmp_path / "a", 0)
    os.remove(file)
    make(file)
    require_told(tmp_path / "a", "a file that is none", refused=True)
    save_small(tmp_path / "b")
    os.remove(tmp_path / "b" / INDEX)
    make(tmp_path / "b" / INDEX)
    require_told(tmp_path / "b", "an index that is none", refused=True)
    with pytest.raises(CheckpointError, match=INDEX):
        shardwise.save({"step": 1}, tmp_path / "b")
    assert INDEX in os.listdir(tmp_path / "b")
