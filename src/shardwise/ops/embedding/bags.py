"""Bags of `embedding_bag` whose ids are one value: which of them this rank makes, each whole, and of what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwise.geometry import Boxes, IntArray
from shardwise.layout import Grid, Layout
from shardwise.ops.embedding.portion import Portion, boxes_of, dealt, portion_of, require_together
from shardwise.ops.engine.plain_operand import shared_plain
from shardwise.process_group import Fields, in_step_sharing
from shardwise.sharded_tensor import ShardedTensor
from shardwise.sharding_spec import spec_of

Gather = Callable[[list[ShardedTensor]], list[torch.Tensor]]  # within the budget, or it raises


@dataclass(frozen=True, eq=False)
class Bags:
    """The bags of one rank, and how all bags lie."""

    layout: Layout  # of all bags, in one dim
    ids: torch.Tensor  # a row for each bag, or all of them flat
    offsets: torch.Tensor | None  # where each bag begins in flat ids
    samples: torch.Tensor | None  # a weight for each id
    counted: torch.Tensor | None = None  # which ids count in frequencies
    whole: tuple[Any, Any, Any] | None = None  # ids, offsets and weights that they were dealt out of, if all are plain


def bags_of(ids: Any, offsets: Any, samples: Any, weight: ShardedTensor, *, ends: bool, gather: Gather) -> Bags:
    """What this rank makes of the arguments of `embedding_bag`; with ``ends``, the last offset is where all ends.

    Bags stay on the rank that has their ids, where each is whole on one. Plain ids, the same on every rank, are dealt
    out. What lies otherwise is gathered, or moved if its bags are rows. Every rank of the group calls it.
    """
    for one in (ids, offsets, samples):
        if isinstance(one, ShardedTensor):
            require_together(one, weight)
    if ids.ndim == 2 and not isinstance(offsets, ShardedTensor):
        return _in_rows(ids, offsets, samples, weight)
    bags = None
    if isinstance(ids, ShardedTensor) and ids.ndim == 1 and not ids._layout.has_replicas:
        bags = _whole_bags(ids, offsets, weight, ends)
    if bags is not None:
        return _where_they_lie(ids, offsets, samples, weight, bags)
    sharded = [one for one in (ids, offsets, samples) if isinstance(one, ShardedTensor)]
    whole = iter(gather(sharded))
    ids, offsets, samples = (next(whole) if isinstance(one, ShardedTensor) else one for one in (ids, offsets, samples))
    return _dealt_bags(ids, offsets, samples, weight, ends)


def _in_rows(ids: Any, offsets: Any, samples: Any, weight: ShardedTensor) -> Bags:
    """Bags of one length: rows of a matrix, of which any rank may have any."""
    portion = portion_of(ids, weight, cut=[0])
    bags = _of_rows(portion.layout)
    like = torch.empty(0, ids.shape[1], dtype=ids.dtype, device=ids.device)
    mine = torch.cat([like, *portion.tensors])
    counted = portion.counted()
    taken = None if samples is None else _same_boxes(samples, portion, like.to(samples.dtype), weight)
    plain = not isinstance(ids, ShardedTensor) and not isinstance(samples, ShardedTensor)
    counted = None if counted is None else counted.view(mine.shape)
    return Bags(bags, mine, offsets, taken, counted, (ids, offsets, samples) if plain else None)


@lru_cache(maxsize=256)
def _of_rows(layout: Layout) -> Layout:
    """How the rows of a matrix lie, each as one element."""
    if isinstance(layout.pattern, Grid):
        grid = layout.pattern.mapped(layout.size[:1], lambda dim, cut: (dim, cut) if dim == 0 else None)
        return Layout.on_grid(grid, layout.places)
    return Layout.of(layout.size[:1], layout.boxes.select([0]), layout.places)


def _same_boxes(samples: Any, portion: Portion, like: torch.Tensor, weight: ShardedTensor) -> torch.Tensor:
    """The weights of this rank's ids; a rank that has none is still in the graph."""
    if not isinstance(samples, ShardedTensor):
        shared = shared_plain(samples, weight._process_group)
        return torch.cat([shared[:0], *boxes_of(shared, portion.layout)])
    moved = samples if samples._layout == portion.layout else samples._redistributed(spec_of(portion.layout))
    anchor = moved._anchored()
    nothing = like if anchor is None else anchor.reshape(-1)[:0].to(like.dtype).view(like.shape)
    return torch.cat([nothing, *moved._local_tensors()])


def _dealt_bags(ids: torch.Tensor, offsets: Any, samples: Any, weight: ShardedTensor, ends: bool) -> Bags:
    """Flat ids that every rank has: each rank takes as many bags."""
    if not isinstance(offsets, torch.Tensor) or offsets.ndim != 1 or ids.ndim != 1:
        return Bags(dealt((0,), weight, [0]), ids, offsets, samples, whole=(ids, offsets, samples))  # torch refuses it
    begins = [*offsets.tolist(), *([] if ends else [len(ids)])]
    layout = dealt((len(begins) - 1,), weight, [0])
    first, last = _span(layout, dist.get_rank())
    span = slice(begins[first], begins[last])
    taken = None if samples is None else shared_plain(samples, weight._process_group)[span]
    own = offsets[first:last] - begins[first]
    return Bags(layout, ids[span], own, taken, whole=(ids, offsets, samples))


def _where_they_lie(ids: ShardedTensor, offsets: Any, samples: Any, weight: ShardedTensor, bags: Layout) -> Bags:
    """Flat ids of which every rank has those of whole bags."""
    begin, _ = _span(ids._layout, dist.get_rank())
    first, last = _span(bags, dist.get_rank())
    mine = offsets.local_tensor() if isinstance(offsets, ShardedTensor) else offsets[first:last]
    like = torch.empty(0, dtype=getattr(samples, "dtype", None), device=ids.device)
    portion = Portion(ids._layout, ids._local_tensors())
    taken = None if samples is None else _same_boxes(samples, portion, like, weight)
    return Bags(bags, ids.local_tensor(), mine - begin, taken)


def _whole_bags(ids: ShardedTensor, offsets: Any, weight: ShardedTensor, ends: bool) -> Layout | None:
    """The layout of the bags, if every rank has one box of the flat ids, in which a bag begins and a bag ends."""
    members = weight._process_group.size()
    if not _has_one_each(ids._layout, members) or offsets is None or offsets.ndim != 1:
        return None
    if not isinstance(offsets, ShardedTensor):
        if ends and (not len(offsets) or int(offsets[-1]) != len(ids)):  # ids that are in no bag
            return None
        return _told_by(offsets.numpy(force=True)[: len(offsets) - ends], ids._layout)
    bags = offsets._layout
    if ends or not _has_one_each(bags, members):
        return None

    def work() -> tuple[None, Fields, bool]:
        (begin, end), mine = _span(ids._layout, dist.get_rank()), offsets.local_tensor().tolist()
        fits = mine[0] == begin and mine[-1] <= end if mine else begin == end
        return None, {"verb": "embedding_bag", "offsets": bags.outline, "ids": ids._layout.outline}, fits

    return bags if all(in_step_sharing(weight._process_group, work)[1]) else None


def _has_one_each(layout: Layout, members: int) -> bool:
    """Whether each rank of the group has one box."""
    return len(layout) == members and layout.places.each_once


def _told_by(offsets: IntArray, ids: Layout) -> Layout | None:
    """The layout of the bags that these offsets give to the ranks that have their ids, if they cut no bag."""
    begins, ends = ids.boxes.offsets[:, 0], ids.boxes.ends[:, 0]
    order = np.lexsort((ids.ranks, ends, begins))
    begins, ends = begins[order], ends[order]
    first = np.searchsorted(offsets, begins)
    if ((np.append(offsets, -1)[first] != begins) & (begins < ends)).any():
        return None
    first[0] = 0
    sizes = np.diff(np.append(first, len(offsets)))
    boxes = Boxes(first.reshape(-1, 1), sizes.reshape(-1, 1))
    return Layout.of(torch.Size([len(offsets)]), boxes, ids.places.take(order))


def _span(layout: Layout, rank: int) -> tuple[int, int]:
    """From where to where the only box of this rank goes, in one dim."""
    (row,) = layout.rows_on(rank)
    box = layout.at([row])
    return int(box.offsets[0, 0]), int(box.ends[0, 0])
