"""A line between the ranks beside the one under test, on which they tell each other how far they are."""

from __future__ import annotations

import functools
import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroupGloo, distributed_c10d

from benchmarks.coverage.watch import Watch

LIMIT = timedelta(seconds=300)  # that one rank may be ahead of another, which works or is ended by its watch
LETTER = 4096  # bytes that go in one round; what is longer needs another


class Diverged(Exception):
    """The ranks are no longer doing the same."""


class Control:
    """A process group of its own; every rank uses it at the same time."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def exchange(self, stage: str, value: Any) -> list[Any]:
        """What every rank has to say, by rank; an error on all of them when they are not at the same stage."""
        self._watch.pause()
        told = _gathered((stage, value))
        self._watch.resume()
        if len({stage for stage, _ in told}) > 1:
            raise Diverged("; ".join(f"rank {rank} is at {stage}: {value}" for rank, (stage, value) in enumerate(told)))
        return [value for _, value in told]


def _gathered(value: Any) -> list[Any]:
    text = pickle.dumps(value)
    letters = _letters(len(text).to_bytes(8, "big") + text, LETTER)
    lengths = [int.from_bytes(letter[:8], "big") for letter in letters]
    if max(lengths) > LETTER - 8:
        letters = _letters(bytes(8) + text, max(lengths) + 8)
    return [pickle.loads(letter[8 : 8 + length]) for letter, length in zip(letters, lengths, strict=True)]


def _letters(mine: bytes, size: int) -> list[bytes]:
    """What every rank sends, cut or filled up to one size."""
    letters = [torch.empty(size, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    letter = torch.frombuffer(bytearray(mine[:size].ljust(size, b"\0")), dtype=torch.uint8)
    _line().allgather([letters], [letter]).wait()
    return [letter.numpy().tobytes() for letter in letters]


@functools.cache
def _line() -> Any:
    """A group that lasts as long as this process; those made by `torch.distributed` end with a task of the pool."""
    store = PrefixStore("coverage", distributed_c10d._get_default_store())
    return ProcessGroupGloo(store, dist.get_rank(), dist.get_world_size(), LIMIT)
