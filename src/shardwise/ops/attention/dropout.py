"""`DropoutFactors`: what the weights of attention are multiplied by, at any place, and the same each time.

The factors are those of dropout on a plain tensor of all weights, by the rule for random numbers: a few are drawn at
once, many by tiles, when a block needs them. They depend on the seed and the position, never on the cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.comm.group import cached_per_group, rank_array
from shardwise.layout import Layout, Places
from shardwise.ops.attention.visibility import Span
from shardwise.tensor.frame import Frame
from shardwise.tensor.random import SMALL, Draw, default_generator, fill_random, next_seed
from shardwise.tensor.random.tiles import fill_tiles

Size = tuple[int, int, int, int]  # samples, heads, queries, keys


@dataclass(frozen=True)
class DropoutFactors:
    """0 where a weight is dropped, elsewhere what makes up for the dropped ones."""

    size: Size
    probability: float
    dtype: torch.dtype
    device: torch.device
    whole: torch.Tensor | None  # of all weights, where there are few
    seed: int

    @staticmethod
    def drawn(
        size: Size, probability: float, dtype: torch.dtype, device: torch.device, group: ProcessGroup
    ) -> DropoutFactors:
        """Of all weights. Every rank of the group calls it; the generators of all advance alike."""
        whole, seed = None, 0
        if math.prod(size) <= SMALL:
            whole = torch.empty(size, dtype=dtype, device=device)
            fill_random(_everywhere(group, size, dtype, device.type), [whole], _draw(probability))
            whole = _scaled(whole, probability)
        else:
            source = default_generator(device)
            seed = 0 if source is None else next_seed(source)
        return DropoutFactors(size, probability, dtype, device, whole, seed)

    def at(self, samples: Span, heads: Span, queries: Span, keys: Span) -> torch.Tensor:
        """The factors of some weights."""
        spans = samples, heads, queries, keys
        if self.whole is not None:
            return self.whole[tuple(slice(*span) for span in spans)]
        made = torch.empty([end - begin for begin, end in spans], dtype=self.dtype, device=self.device)
        box = [begin for begin, _ in spans], [end for _, end in spans]
        fill_tiles(_draw(self.probability), self.size, [box], [made], self.seed)
        return _scaled(made, self.probability)


def _draw(probability: float) -> Draw:
    return Draw(torch.Tensor.bernoulli_, (1 - probability,), most=SMALL)


def _scaled(kept: torch.Tensor, probability: float) -> torch.Tensor:
    return kept.div_(1 - probability) if probability < 1 else kept.zero_()


@cached_per_group()
def _everywhere(group: ProcessGroup, size: Size, dtype: torch.dtype, device_type: str) -> Frame:
    layout = Layout.whole(size, Places.on_ranks(rank_array(group), device_type))
    return Frame.of(layout, None, layout.rows_on(dist.get_rank()), dtype, group)
