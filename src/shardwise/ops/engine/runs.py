"""Runs: a dim in one stretch for each rank of a group, in the order of ranks. So values are sorted, scanned and routed.

Runs may be of any length. A tensor that lies so already stays where it is; any other is moved into even chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.autograd.replicas import recorded
from shardwise.comm.group import cached_per_group, rank_array
from shardwise.layout import Layout
from shardwise.layout.geometry import IntArray
from shardwise.layout.specs import spec_of
from shardwise.layout.specs.chunking import sized_axis
from shardwise.ops.engine.compute import assemble, group_places, result_frame
from shardwise.ops.engine.plain_operand import shared_plain
from shardwise.ops.engine.schedule import chunked_layout
from shardwise.tensor import ShardedTensorBase


class Runs(NamedTuple):
    """The first dim of a tensor in runs."""

    layout: Layout
    edges: IntArray  # where each run begins, and where the last one ends
    here: int  # the number of this rank in the group

    @property
    def sizes(self) -> IntArray:
        """The length of each run."""
        return np.diff(self.edges)

    @property
    def begin(self) -> int:
        """Where the run of this rank begins."""
        return int(self.edges[self.here])

    def of_size(self, size: Sequence[int]) -> Layout:
        """The layout of another tensor in runs of the same lengths."""
        if list(size) == list(self.layout.size):
            return self.layout
        return Layout.by_rule(size, [sized_axis(0, self.sizes.tolist())], self.layout.places)


@cached_per_group(maxsize=512)
def runs_of(group: ProcessGroup, layout: Layout) -> Runs:
    """The runs of a tensor: its own if it lies in runs, else even chunks."""
    if not _lies_in_runs(layout, rank_array(group)):
        layout = chunked_layout(layout.size, group_places(layout, group), 0)
    return Runs(layout, np.append(layout.boxes.offsets[:, 0], layout.size[0]), dist.get_rank(group))


def _lies_in_runs(layout: Layout, ranks: IntArray) -> bool:
    if not np.array_equal(layout.ranks, ranks) or any(layout.cuts(dim) for dim in range(1, layout.ndim)):
        return False
    begins, ends = layout.boxes.offsets[:, 0], layout.boxes.ends[:, 0]
    return bool(np.array_equal(begins[1:], ends[:-1]) and begins[0] == 0 and ends[-1] == layout.size[0])


def local_run(x: torch.Tensor, model: ShardedTensorBase, like: Runs | None = None) -> tuple[torch.Tensor, Runs]:
    """This rank's run of a tensor, and the runs of all, which are ``like`` others if these are given.

    A plain tensor, the same on every rank, is cut without a message. Every rank of the group of the model calls it.
    """
    group = model._frame.process_group
    assert group is not None
    if like is None and isinstance(x, ShardedTensorBase):
        runs = runs_of(group, x._layout)
    else:
        places = group_places(model._layout, group)
        runs = runs_of(group, chunked_layout(x.shape, places, 0) if like is None else like.of_size(x.shape))
    if isinstance(x, ShardedTensorBase):
        moved: Any = x if runs.layout == x._layout else x._redistributed(spec_of(runs.layout))  # type: ignore[attr-defined] # on a group
        return recorded(moved)[0][0], runs
    return shared_plain(x, group).narrow(0, runs.begin, int(runs.sizes[runs.here])), runs


def from_runs(part: torch.Tensor, runs: Runs, model: ShardedTensorBase) -> ShardedTensorBase:
    """The tensor whose runs are the parts of all ranks; nothing travels. The parts may have other dims behind."""
    layout = runs.of_size([runs.layout.size[0], *part.shape[1:]])
    frame = result_frame(layout, part.dtype, model._frame.process_group)
    return assemble(type(model), frame, [part], [], torch.is_grad_enabled() and part.requires_grad)
