"""Damage to the files of a checkpoint, of every kind and anywhere: it must never pass unseen.

``python -m tests.checkpoint.fuzz 2000`` tries so many, and tells how they were found and how long the slowest took.
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.cases import ALL, PLAIN, SIZE, chunks

import shardwise
from shardwise.checkpoint.archive.index_file import INDEX
from shardwise.errors import CheckpointError
from shardwise.tensor import shard_tensor
from shardwise.testing import run_on_ranks

PAGE = 4096


def state(number: int, cut: Callable[[torch.Tensor, str], torch.Tensor]) -> dict[str, Any]:
    """Tensors of all kinds, and values; another number makes others of the same form."""
    ramp = torch.arange(3000.0).reshape(50, 60) + number
    return {
        "rows": cut(ramp, "chunk dim 0"),
        "odd": cut(PLAIN + number, "uneven, several per rank"),
        "replicated": cut(PLAIN * 2 + number, "replicated"),
        "plain": torch.arange(2000, dtype=torch.int16) + number,
        "of two blocks": (torch.arange(1_200_000) % 251 + number).to(torch.uint8),
        "scalar": torch.tensor(2.5 + number),
        "complex": torch.complex(ramp[:5], ramp[5:10]),
        "bool": torch.arange(100) % 3 == number % 3,
        "bf16": (ramp[:3] + number).to(torch.bfloat16),
        "values": {"step": 3 + number, "names": ["a", ("b", b"\x00")], "loss": 0.5},
    }


def save_on_a_rank(folder: str) -> None:
    """The checkpoint, and one of the same form with other values."""

    def cut(plain: torch.Tensor, name: str) -> torch.Tensor:
        return shard_tensor(plain, chunks(0, 0, 1, 2, 3) if plain.shape != SIZE else ALL[name])

    for number, name in enumerate(("one", "other")):
        shardwise.save(state(number, cut), Path(folder) / name)


def save_both(folder: Path) -> None:
    """Both of them, on four ranks."""
    run_on_ranks(4, save_on_a_rank, str(folder))


def blank() -> dict[str, Any]:
    """What they load into, in one process."""
    made: dict[str, Any] = {
        name: torch.zeros_like(tensor) for name, tensor in state(0, lambda plain, _: plain).items() if name != "values"
    }
    return {**made, "values": {"step": 0, "names": [], "loss": 0.0}}


class Fuzz:
    """A checkpoint to damage and to mend again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "one"
        self.files = {file.name: file.read_bytes() for file in sorted(self.folder.iterdir())}
        others = {file.name: file.read_bytes() for file in sorted((folder / "other").iterdir())}
        self.other = dict(zip(self.files, others.values(), strict=True))  # in the same order
        self.tensors = [name for name in self.files if name != INDEX]

    def damage(self, dice: random.Random) -> tuple[str, dict[str, bytes], bool]:
        """Some damage: what it is, the files that are then different, and whether only bytes of tensors are."""
        while True:
            what = dice.choice(KINDS)
            name = dice.choice(list(self.files))
            changed = {name: what(self.files[name], dice)} if what in IN_PLACE else self._of_two(what, name, dice)
            if any(content != self.files[name] for name, content in changed.items()):
                inside = what in SAME_SIZE and name != INDEX and self._only_tensors(name, changed[name])
                return what.__name__, changed, inside

    def _of_two(self, what: Any, name: str, dice: random.Random) -> dict[str, bytes]:
        if what is swap:
            one, two = dice.sample(self.tensors, 2)
            return {one: self.files[two], two: self.files[one]}
        return {name: self.other[name]}

    def _only_tensors(self, name: str, content: bytes) -> bool:
        before = self.files[name]
        begin = 8 + int.from_bytes(before[:8], "little")
        table = int(re.search(rb'"__checksums__":.*?"data_offsets":\[(\d+)', before)[1]) + begin  # type: ignore[index]
        return before[:begin] == content[:begin] and before[table:] == content[table:]

    def try_one(self, dice: random.Random) -> tuple[str, float]:
        """Damage it, read it in both ways, and mend it; the kind, and the seconds that the slower one took."""
        kind, changed, inside = self.damage(dice)
        try:
            for name, content in changed.items():
                (self.folder / name).write_bytes(content)
            named = r"(?s)of tensor '.*in file 'rank-" if inside else r"(?s)rank-\d{5}\.|index\.json"
            took = 0.0
            for read in (lambda: shardwise.load(blank(), self.folder), lambda: shardwise.verify(self.folder)):
                begun = time.perf_counter()
                said = "nothing"
                try:
                    read()
                except CheckpointError as error:
                    said = str(error)
                took = max(took, time.perf_counter() - begun)
                assert re.search(named, said), f"of {kind} in {list(changed)} was said: {said}"
        finally:
            for name in changed:
                (self.folder / name).write_bytes(self.files[name])
        return kind, took

    def require_whole(self) -> None:
        """Without damage, it loads."""
        loaded = shardwise.load(blank(), self.folder)
        expected = state(0, lambda plain, _: plain)
        assert loaded.pop("values") == expected.pop("values")
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
        shardwise.verify(self.folder)


def flip(content: bytes, dice: random.Random) -> bytes:
    """One bit; often near an end, where headers and tables are."""
    at = dice.choice([dice.randrange(len(content)), dice.randrange(min(900, len(content))), -1 - dice.randrange(60)])
    changed = bytearray(content)
    changed[at] ^= 1 << dice.randrange(8)
    return bytes(changed)


def truncate(content: bytes, dice: random.Random) -> bytes:
    """Some bytes are gone at the end, or all."""
    return content[: dice.choice([0, dice.randrange(len(content)), len(content) - 1 - dice.randrange(9)])]


def extend(content: bytes, dice: random.Random) -> bytes:
    """Some more at the end."""
    return content + dice.choice([b"\x00", b" ", b"\n", content[:7], dice.randbytes(100)])


def zero(content: bytes, dice: random.Random) -> bytes:
    """A page that was never written."""
    begin = dice.randrange(-(-len(content) // PAGE)) * PAGE
    page = content[begin : begin + PAGE]
    return content[:begin] + bytes(len(page)) + content[begin + PAGE :]


def double(content: bytes, dice: random.Random) -> bytes:
    """Some bytes a second time, with all behind them moved."""
    begin = dice.randrange(len(content))
    end = begin + dice.randint(1, 64)
    return content[:end] + content[begin:end] + content[end:]


def smear(content: bytes, dice: random.Random) -> bytes:
    """Some bytes a second time, over those that follow."""
    begin, length = dice.randrange(len(content)), dice.randint(1, 64)
    some = content[begin : begin + length]
    return (content[: begin + length] + some + content[begin + 2 * length :])[: len(content)]


def lose(content: bytes, dice: random.Random) -> bytes:
    """Some bytes are gone in the middle."""
    begin = dice.randrange(len(content))
    return content[:begin] + content[begin + dice.randint(1, 64) :]


def swap(content: bytes, dice: random.Random) -> bytes:
    """Two files have each other's name."""
    raise AssertionError("it is of two files")


def mix(content: bytes, dice: random.Random) -> bytes:
    """The file of another checkpoint under this one's name."""
    raise AssertionError("it is of two files")


IN_PLACE = (flip, flip, flip, truncate, extend, zero, double, smear, lose)
SAME_SIZE = (flip, zero, smear)
KINDS = (*IN_PLACE, swap, mix)


def main(count: int, seed: int = 0) -> None:
    """Try so many, and tell."""
    with tempfile.TemporaryDirectory() as folder:
        save_both(Path(folder))
        fuzz, dice = Fuzz(Path(folder)), random.Random(seed)
        found = [fuzz.try_one(dice) for _ in range(count)]
        fuzz.require_whole()
    print(f"{count} damages, all told: {dict(Counter(kind for kind, _ in found))}")
    print(f"the slowest took {max(took for _, took in found):.3f} s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
