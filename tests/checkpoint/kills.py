"""Saves that are killed: afterwards the older state is there whole, or the new one, and the next save clears up.

``python -m tests.checkpoint.kills 200`` kills so many: at every call of the file system in turn, in saves that wait and
in the background, and then at random moments, which are counted in time of the CPU: so a busy machine changes nothing.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

import shardwise
from shardwise.checkpoint import read_index

CALLS = ("open", "pwrite", "fsync", "replace", "remove", "scandir", "mkdir", "rmdir", "close")
LARGE = 2**20  # elements of the largest tensor, which is written by several calls


def state(number: int, large: int = 1000) -> dict[str, Any]:
    """A state all of whose values tell which it is."""
    tensors = [torch.full((size,), float(number)) for size in (10, 300_000, large)]
    return {"tensors": tensors, "number": number}


def found_in(folder: Path) -> int:
    """Which state is there, whole."""
    blank = state(-1, read_index(folder).state["tensors"][2].size[0])
    shardwise.load(blank, folder)
    assert all(bool((tensor == blank["number"]).all()) for tensor in blank["tensors"]), "a mixture"
    shardwise.verify(folder)
    return int(blank["number"])


def require_clean(folder: Path) -> None:
    """Nothing is there but the checkpoint."""
    assert sorted(os.listdir(folder)) == sorted([*read_index(folder).files, "index.json"]), os.listdir(folder)


def dying_at(number: int) -> None:
    """Kill this process at its so many-th call of the file system from now on."""
    left = [number]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def save_in_a_child(
    folder: Path, number: int, *, wait: bool, at: int | None = None, after: float | None = None, large: int = 1000
) -> int:
    """Fork, and save there; the process to wait for. It dies at a call, or after so many seconds of the CPU, if any."""
    child = os.fork()
    if child:
        return child
    try:
        if at is not None:
            dying_at(at)
        if after is not None:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process
            signal.setitimer(signal.ITIMER_PROF, after)
        handle = shardwise.save(state(number, large), folder, wait=wait)
        if handle is not None:
            handle.wait()
    except BaseException as error:
        os.write(2, f"{error!r}\n".encode())
        os._exit(1)
    os._exit(0)


def ended(child: int) -> bool:
    """Whether a child was killed, rather than done."""
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGPROF)
        return True
    assert os.WEXITSTATUS(status) == 0, "the save failed"
    return False


def kill_at_calls(folder: Path, step: int) -> Iterator[str]:
    """At each call in turn, or some of them, of a save that waits and of one in the background, over
    an older checkpoint; which state was there afterwards."""
    for wait in (True, False):
        at, number, killed = 0, 1, True
        while killed:
            shardwise.save(state(number), folder)
            require_clean(folder)
            killed = ended(save_in_a_child(folder, number + 1, wait=wait, at=at))
            left = found_in(folder)
            assert left in ((number, number + 1) if killed else (number + 1,))
            yield ("old" if left == number else "new") + (" at a call" if wait else " at a call in the background")
            at, number = at + step, number + 2


def kill_at_moments(folder: Path, dice: random.Random) -> Iterator[str]:
    """At random moments of saves of larger states."""
    number = 1
    while True:
        begun = time.process_time()
        shardwise.save(state(number, LARGE), folder)
        took = time.process_time() - begun
        require_clean(folder)
        wait, after = dice.random() < 0.5, max(dice.random() * 1.5 * took, 1e-6)  # 0 would be never
        killed = ended(save_in_a_child(folder, number + 1, wait=wait, after=after, large=LARGE))
        left = found_in(folder)
        assert left in ((number, number + 1) if killed else (number + 1,))
        yield ("old" if left == number else "new") + " at a moment"
        number += 2


def kill_first_saves(folder: Path, step: int) -> Iterator[str]:
    """At each call of a save where nothing was before: nothing is there then, or all of it."""
    for at in range(0, 1000, step):
        place = folder / str(at)
        killed = ended(save_in_a_child(place, 1, wait=True, at=at))
        there = place.exists() and "index.json" in os.listdir(place)
        assert not there or found_in(place) == 1
        assert there or killed
        shardwise.save(state(2), place)
        require_clean(place)
        yield ("new" if there else "nothing") + " at a call of a first one"
        if not killed:
            return


def main(count: int, seed: int = 0) -> None:
    """So many kills, and what was there after them."""
    torch.set_num_threads(1)
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in "abc"]
        dice = random.Random(seed)
        step = 1 if count >= 200 else 6
        kills = chain(kill_at_calls(paths[0], step), kill_first_saves(paths[1], step), kill_at_moments(paths[2], dice))
        seen.update(islice(kills, count))
    print(f"{sum(seen.values())} kills, and each time a whole one: {dict(seen)}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
