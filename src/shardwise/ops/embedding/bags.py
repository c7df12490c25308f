"""`Bags`: the bags of `embedding_bag` that this rank computes. A bag is never cut."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from shardwise.comm.agreement import in_op, in_step_sharing
from shardwise.comm.group import Fields
from shardwise.errors import PropertyError
from shardwise.layout import Grid, Layout
from shardwise.layout.geometry import Boxes, IntArray
from shardwise.layout.specs import spec_of
from shardwise.ops.embedding.portion import Portion, chunk_ids, local_boxes, local_portion, require_same_group
from shardwise.ops.engine.plain_operand import shared_plain
from shardwise.tensor import ShardedTensor


@dataclass(frozen=True, eq=False)
class Bags:
    """The bags of this rank, and the layout of all bags."""

    layout: Layout  # of all bags, in one dim
    ids: torch.Tensor  # a row for each bag, or flat
    offsets: torch.Tensor | None  # where each bag begins in flat ids
    samples: torch.Tensor | None  # a weight for each id
    counted: torch.Tensor | None = None  # which ids count in frequencies
    whole: tuple[Any, Any, Any] | None = None  # ids, offsets and weights of all bags, if they are plain


def local_bags(ids: Any, offsets: Any, samples: Any, weight: ShardedTensor, *, ends: bool) -> Bags:
    """The bags of this rank, from the arguments of `embedding_bag`; with ``ends``, the last offset is the end.

    Bags are computed on the rank with their ids if no bag is cut. Of plain ids, the same on every rank, each rank takes
    a part. Other ids are redistributed, so that no bag is cut. Every rank of the group calls it.
    """
    sharded = [one for one in (ids, offsets, samples) if isinstance(one, ShardedTensor)]
    for one in sharded:
        require_same_group(one, weight)
    if ids.ndim == 2 and not isinstance(offsets, ShardedTensor):
        return _in_rows(ids, offsets, samples, weight)
    if ids.ndim != 1 or not isinstance(offsets, torch.Tensor) or offsets.ndim != 1 or len(offsets) < ends:
        given = _stand_in(ids), _stand_in(offsets), _stand_in(samples)
        return Bags(chunk_ids((0,), weight, [0]), *given, whole=given)  # torch will raise
    bags = None
    if isinstance(ids, ShardedTensor) and not ids._layout.has_replicas:
        bags = _whole_bags(ids, offsets, weight, ends)
    if bags is not None:
        return _bags_in_place(ids, offsets, samples, weight, bags)
    if sharded:
        return _moved_bags(ids, offsets, samples, weight, ends)
    return _even_bags(ids, offsets, samples, weight, ends)


def _stand_in(value: Any) -> Any:
    """A plain tensor of the same size, for checks that read no values."""
    if not isinstance(value, ShardedTensor):
        return value
    return torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape)


def _in_rows(ids: Any, offsets: Any, samples: Any, weight: ShardedTensor) -> Bags:
    """Bags of one length: the rows of a matrix."""
    portion = local_portion(ids, weight, cut=[0])
    bags = _row_layout(portion.layout)
    like = torch.empty(0, ids.shape[1], dtype=ids.dtype, device=ids.device)
    mine = torch.cat([like, *portion.tensors])
    counted = portion.counted()
    taken = None if samples is None else _local_weights(samples, portion, like.to(samples.dtype), weight)
    plain = not isinstance(ids, ShardedTensor) and not isinstance(samples, ShardedTensor)
    counted = None if counted is None else counted.view(mine.shape)
    return Bags(bags, mine, offsets, taken, counted, (ids, offsets, samples) if plain else None)


@lru_cache(maxsize=256)
def _row_layout(layout: Layout) -> Layout:
    """The layout of the rows of a matrix, each as one element."""
    if isinstance(layout.pattern, Grid):
        grid = layout.pattern.mapped(layout.size[:1], lambda dim, cut: (dim, cut) if dim == 0 else None)
        return Layout.on_grid(grid, layout.places)
    return Layout.of(layout.size[:1], layout.boxes.select([0]), layout.places)


def _local_weights(samples: Any, portion: Portion, like: torch.Tensor, weight: ShardedTensor) -> torch.Tensor:
    """The weights of this rank's ids; on a rank without ids an empty tensor, in the graph."""
    if not isinstance(samples, ShardedTensor):
        shared = shared_plain(samples, weight._process_group)
        return torch.cat([shared[:0], *local_boxes(shared, portion.layout)])
    moved = samples if samples._layout == portion.layout else samples._redistributed(spec_of(portion.layout))
    anchor = moved._anchored()
    nothing = like if anchor is None else anchor.reshape(-1)[:0].to(like.dtype).view(like.shape)
    return torch.cat([nothing, *moved._local_tensors()])


def _even_bags(ids: torch.Tensor, offsets: torch.Tensor, samples: Any, weight: ShardedTensor, ends: bool) -> Bags:
    """Flat ids that every rank has: each rank takes the same number of bags."""
    layout = chunk_ids((len(offsets) - ends,), weight, [0])
    mine, bounds = _offsets_of_chunk(offsets, layout, len(ids), weight)
    (row,) = layout.rows_on(dist.get_rank())
    span = slice(bounds[row], bounds[row + 1])
    taken = None if samples is None else shared_plain(samples, weight._process_group)[span]
    return Bags(layout, ids[span], mine - bounds[row], taken, whole=(ids, offsets, samples))


def _moved_bags(ids: Any, offsets: torch.Tensor, samples: Any, weight: ShardedTensor, ends: bool) -> Bags:
    """Flat ids that are redistributed: each rank takes the same number of bags."""
    bags = chunk_ids((len(offsets) - ends,), weight, [0])
    mine, bounds = _offsets_of_chunk(offsets, bags, len(ids), weight)
    bounds[0] = 0  # torch will raise where the first offset is another
    if bounds != sorted(bounds) or bounds[-1] > len(ids):

        def refused() -> NoReturn:
            raise PropertyError(
                f"offsets of bags must not fall, and end within the {len(ids)} ids: the bags of the ranks begin at "
                f"{bounds[:-1]}, and the last ends at {bounds[-1]}"
            )

        in_op(weight._process_group, refused)  # plain offsets of other ranks may be right
    edges = np.array([*bounds[:-1], len(ids)], dtype=np.int64).reshape(-1, 1)  # ids in no bag go to the last rank
    layout = Layout.of(ids.shape, Boxes(edges[:-1], edges[1:] - edges[:-1]), bags.places)
    if isinstance(ids, ShardedTensor):
        moved = ids if ids._layout == layout else ids._redistributed(spec_of(layout))
        portion = Portion(layout, moved._local_tensors())
    else:
        portion = Portion(layout, local_boxes(ids, layout))
    (row,) = bags.rows_on(dist.get_rank())
    count = bounds[row + 1] - bounds[row]
    like = torch.empty(0, dtype=getattr(samples, "dtype", None), device=ids.device)
    taken = None if samples is None else _local_weights(samples, portion, like, weight)[:count]
    return Bags(bags, portion.tensors[0][:count], mine - bounds[row], taken)


def _offsets_of_chunk(
    offsets: torch.Tensor, bags: Layout, ids: int, weight: ShardedTensor
) -> tuple[torch.Tensor, list[int]]:
    """Where each bag of this rank begins, where the first of each rank does, and where the last bag ends.

    There may be one offset more than bags: the end. Of sharded offsets, two numbers of each rank travel to all.
    """
    ends = len(offsets) - bags.size[0]
    first, last = _span(bags, dist.get_rank())
    if not isinstance(offsets, ShardedTensor):
        known = [*offsets.tolist(), ids]
        return offsets[first:last], [known[k] for k in (*bags.boxes.offsets[:, 0].tolist(), bags.size[0])]
    sizes = bags.boxes.sizes.copy()
    sizes[-1] += ends
    layout = Layout.of(offsets.shape, Boxes(bags.boxes.offsets, sizes), bags.places)
    moved: Any = offsets if offsets._layout == layout else offsets._redistributed(spec_of(layout))
    mine: torch.Tensor = moved._local_tensors()[0]

    def work() -> tuple[None, Fields, list[int]]:
        about = {"verb": "embedding_bag", "offsets": offsets._layout.outline, "ids": ids}
        return None, about, [*mine[:1].tolist(), *mine[-1:].tolist()]

    told = in_step_sharing(weight._process_group, work)[1]
    bounds = [told[-1][1] if ends else ids]
    for brought in reversed(list(told)):
        bounds.insert(0, brought[0] if brought else bounds[0])
    return mine[: last - first], bounds


def _bags_in_place(ids: ShardedTensor, offsets: Any, samples: Any, weight: ShardedTensor, bags: Layout) -> Bags:
    """Flat ids of which every rank has whole bags."""
    begin, _ = _span(ids._layout, dist.get_rank())
    first, last = _span(bags, dist.get_rank())
    mine = offsets.local_tensor() if isinstance(offsets, ShardedTensor) else offsets[first:last]
    like = torch.empty(0, dtype=getattr(samples, "dtype", None), device=ids.device)
    portion = Portion(ids._layout, ids._local_tensors())
    taken = None if samples is None else _local_weights(samples, portion, like, weight)
    return Bags(bags, ids.local_tensor(), mine - begin, taken)


def _whole_bags(ids: ShardedTensor, offsets: Any, weight: ShardedTensor, ends: bool) -> Layout | None:
    """The layout of the bags, if every rank has one box of the flat ids that cuts no bag."""
    members = weight._process_group.size()
    if not _has_one_each(ids._layout, members) or offsets is None or offsets.ndim != 1:
        return None
    if not isinstance(offsets, ShardedTensor):
        if ends and (not len(offsets) or int(offsets[-1]) != len(ids)):  # some ids are in no bag
            return None
        return _layout_by_offsets(offsets.numpy(force=True)[: len(offsets) - ends], ids._layout)
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


def _layout_by_offsets(offsets: IntArray, ids: Layout) -> Layout | None:
    """The layout of the bags on the ranks of their ids, if no bag is cut."""
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
    """Begin and end of the only box of a rank, in one dim."""
    (row,) = layout.rows_on(rank)
    box = layout.at([row])
    return int(box.offsets[0, 0]), int(box.ends[0, 0])
