"""Many copies between views, found out once and made as often as one likes: on a GPU by few kernels for all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec

import torch

from shardwise.transfer.views import copy, is_as_it_lies

Pair = tuple[torch.Tensor, torch.Tensor]  # target and source, of one shape


class Copies:
    """Pairs of views, each copied into the other; their memory is kept as long as this is."""

    __slots__ = ("_launches", "_single", "nbytes")

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.nbytes = sum(target.nbytes for target, _ in pairs)
        self._single: list[Pair] = []
        fused: dict[torch.device, list[Pair]] = {}
        for target, source in pairs:
            if target.is_cuda and source.device == target.device and has_kernels() and is_as_it_lies(target, source):
                fused.setdefault(target.device, []).append((target, source))
            else:
                self._single.append((target, source))
        self._launches: list[Callable[[], object]] = []
        for device, some in fused.items():
            from shardwise.transfer.copy_kernel import launches  # where there is Triton

            made, left = launches(device, some)
            self._launches += made
            self._single += left

    def make(self) -> None:
        """Copy all of them, as they are now."""
        for launch in self._launches:
            launch()
        for target, source in self._single:
            copy(target, source)


@cache
def has_kernels() -> bool:
    """Whether there is Triton, which comes with torch where there is CUDA, and works: it wants a C compiler, a folder
    to write to, and a GPU that is not too old. Asked once, by a copy; without it, views are copied one by one."""
    if find_spec("triton") is None:
        return False
    try:
        from shardwise.transfer.copy_kernel import launches

        target, source = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
        for launch in launches(target.device, [(target, source)])[0]:
            launch()
        return bool(target.item())
    except Exception as error:  # of whatever kind: Triton's own, of the compiler, of the files
        logging.getLogger("shardwise").warning("views are copied one by one, for Triton fails: %s", error)
        return False
