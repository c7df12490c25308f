"""`Draw`: one of torch's functions that fill a tensor with random numbers, with its parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

LARGE = 1 << 26  # elements that every rank draws on a CPU for a new tensor, so that it has a plain tensor's numbers
SMALL = 1 << 20  # the same for what is drawn in every step, such as the mask of a dropout


class Draw(NamedTuple):
    """A random fill: equal draws fill equal tensors alike from equal generators."""

    function: Any  # a method of torch.Tensor that writes in place and takes a generator
    args: tuple[Any, ...] = ()
    most: int = LARGE  # how many elements a CPU draws one after the other to find a few of them
    chunks: int = 1  # on CUDA, how many chunks must be drawn together

    def into(self, tensor: torch.Tensor, generator: torch.Generator | None) -> None:
        """Fill a plain tensor."""
        self.function(tensor, *self.args, generator=generator)


UNIFORM, NORMAL = Draw(torch.Tensor.uniform_), Draw(torch.Tensor.normal_)
