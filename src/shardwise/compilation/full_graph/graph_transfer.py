"""What an op of a graph may do: move what a plan says, add up replicas or gradients, draw random numbers.

The key of a transfer is a digest of all that it does, so that equal keys mean equal transfers in any process, also
where a compiler keeps its results on disk.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.autograd.buckets import LeafGradient, agreed_sum, sum_together
from shardwise.comm.transfer import Moving, TransferPlan, empty_tensors, move
from shardwise.comm.transfer.all_reduce import holding_of, sum_replicas
from shardwise.layout import Layout
from shardwise.ops.engine.steps import DrawRandom

Sizes = list[tuple[list[int], torch.dtype, torch.device]]


class Transfer(Protocol):
    """What one op of a graph does."""

    gives_new_memory: ClassVar[bool]  # whether each result is contiguous, in memory that nothing else has

    @property
    def key(self) -> str:
        """Equal for transfers that do the same."""

    @property
    def group(self) -> ProcessGroup | None:
        """Whose ranks take part."""

    def sizes(self) -> Sizes:
        """Of the results on this rank."""

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results. Every rank of the group calls it."""


def _key(name: str, group: ProcessGroup | None, *parts: Any) -> str:
    """A name that can be read, and a digest of everything."""
    members = None if group is None else (group.group_name, dist.get_process_group_ranks(group))
    digest = hashlib.blake2b(digest_size=12)
    for part in (members, *parts):
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
    return f"{name} {digest.hexdigest()}"


@dataclass(frozen=True, eq=False)
class Move:
    """A plan that is carried out."""

    gives_new_memory: ClassVar[bool] = True

    plan: TransferPlan
    group: ProcessGroup
    dtype: torch.dtype
    max_bytes: int | None
    fill: Any

    @cached_property
    def key(self) -> str:
        """Of the plan and the options."""
        plan = self.plan
        hosts = None if plan.hosts is None else plan.hosts.tobytes()
        options = plan.sums, plan.forward is None, hosts, self.dtype, self.max_bytes, self.fill
        name = "add up" if plan.sums else "move"
        return _key(f"{name} {tuple(plan.src.size)}", self.group, plan.src.digest, plan.dst.digest, *options)

    def sizes(self) -> Sizes:
        """Of the destination."""
        return _sizes(self.plan.dst, self.dtype)

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Move now."""
        return self._begin(tensors, None).wait()

    def begin(self, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Moving] | None:
        """Begin to move: the memory of the results, and what is under way. None where the host must take part."""
        if not self.plan.moved or self.max_bytes is not None:
            return None
        outs = empty_tensors(self.plan.dst, self.dtype, fill=None if self.plan.sums else self.fill)
        return outs, self._begin(tensors, outs)

    def _begin(self, tensors: list[torch.Tensor], outs: list[torch.Tensor] | None) -> Moving:
        options = {"dtype": self.dtype, "max_bytes": self.max_bytes, "fill": self.fill, "lent": True}
        return move(self.plan, tensors, self.group, outs=outs, **options, verb="a transfer of a compiled graph")


@dataclass(frozen=True, eq=False)
class ReplicaSums:
    """Sums over the replicas of one layout."""

    gives_new_memory: ClassVar[bool] = False

    layout: Layout
    group: ProcessGroup
    dtype: torch.dtype

    @cached_property
    def key(self) -> str:
        """Of the layout."""
        return _key(f"sum {tuple(self.layout.size)}", self.group, self.layout.digest, self.dtype)

    def sizes(self) -> Sizes:
        """Those of the local tensors."""
        return _sizes(self.layout, self.dtype)

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Add up now."""
        said = agreed_sum(self.group, self.layout.outline, self.dtype)
        return sum_replicas(self.layout, tensors, self.group, dtype=self.dtype, **said)


@dataclass(frozen=True, eq=False)
class LeafSums:
    """Sums over the replicas of many leaves, sent together. No rank holds two replicas of one box."""

    gives_new_memory: ClassVar[bool] = False

    layouts: tuple[Layout, ...]
    group: ProcessGroup
    dtype: torch.dtype

    @cached_property
    def key(self) -> str:
        """Of all layouts."""
        digests = [layout.digest for layout in self.layouts]
        return _key(f"sum of {len(digests)} gradients", self.group, *digests, self.dtype)

    def sizes(self) -> Sizes:
        """Those of the local tensors of all leaves."""
        return [one for layout in self.layouts for one in _sizes(layout, self.dtype)]

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Add up now."""
        rank, size = dist.get_rank(), self.group.size()
        rest, gradients, order = iter(range(len(tensors))), [], []
        for layout in self.layouts:
            holding = holding_of(layout, rank, size)
            numbers = [next(rest) for _ in layout.rows_on(rank)]
            order += [numbers[k] for (k,) in holding.numbers]  # of tensors by box
            local = [tensors[numbers[k]] for (k,) in holding.numbers]
            gradients.append(LeafGradient(holding, layout.outline, local, local))
        sums = sum_together(gradients, self.group, self.dtype)
        return [sums[order.index(k)] for k in range(len(tensors))]


@dataclass(frozen=True, eq=False)
class RandomDraw:
    """Random numbers for the boxes of a frame; nothing is sent, but the generators of all ranks advance alike."""

    gives_new_memory: ClassVar[bool] = False

    draw: DrawRandom

    @property
    def group(self) -> ProcessGroup | None:
        """Of the frame."""
        return self.draw.frame.process_group

    @cached_property
    def key(self) -> str:
        """Of the frame and the distribution."""
        draw, frame = self.draw.draw, self.draw.frame
        what = draw.function.__name__, draw.args, draw.most, draw.chunks, self.draw.order, frame.dtype, frame.device
        return _key(f"draw {tuple(frame.size)}", frame.process_group, frame.layout.digest, what)

    def sizes(self) -> Sizes:
        """Of the boxes."""
        return _sizes(self.draw.frame.layout, self.draw.frame.dtype)

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Draw now."""
        return self.draw()


def _sizes(layout: Layout, dtype: torch.dtype) -> Sizes:
    rows = layout.rows_on(dist.get_rank())
    return [(layout.extent(row), dtype, layout.place(row).device) for row in rows]
