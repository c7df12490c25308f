"""`BlockPlan`: which keys come to which rank in which round, and what this rank computes then. Pure.

Every rank needs the keys that its queries see. Those that it holds are round 0. The others come in rounds: in each, a
rank hears from the next few ranks behind it, so that no rank sends to all at once, and only the keys of one round are
in memory. A few bytes go in one round. What no query of a rank sees does not travel.

Keys and values travel together: as one tensor of samples, positions, heads and width, for a piece of one sample lies
whole in its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardwise.comm.transfer import TransferPlan, make_plan
from shardwise.layout import Layout
from shardwise.layout.geometry import Boxes
from shardwise.ops.attention.visibility import Band, Span, Visibility, blocks_of

ROUND_BYTES = 32 << 20  # of keys and values that a rank gets in a round, at least, if there are so many
MASKED = 1 << 22  # elements of a mask that a block takes, at most


class AttentionSizes(NamedTuple):
    """What a plan depends on beside the layouts."""

    width: int  # of a key and a value together
    itemsize: int
    has_mask: bool
    visibilities: tuple[Visibility, ...]  # one for all samples, or one for each


class BlockTask(NamedTuple):
    """A block: some queries of a local tensor, and some keys of a tensor that lies here in this round."""

    query: int  # the number of the local tensor of queries
    piece: int  # the number of the tensor of keys
    samples: Span  # these and the following in the whole tensors
    heads: Span  # of keys
    queries: Span
    keys: Span
    in_query: tuple[slice, slice, slice]  # samples, heads and queries in the local tensor
    in_piece: tuple[slice, slice, slice]  # samples, heads and keys in the tensor of this round
    band: Band


class AttentionRound(NamedTuple):
    """Keys that come together, and the blocks with them."""

    plan: TransferPlan | None  # None for the keys that lie here anyway
    tasks: tuple[BlockTask, ...]


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """All rounds; the same number of them on every rank."""

    rounds: tuple[AttentionRound, ...]

    @property
    def moved(self) -> int:
        """Elements that travel between ranks."""
        return sum(one.plan.moved for one in self.rounds if one.plan is not None)


class _Part(NamedTuple):
    """Samples and heads of a box."""

    samples: Span
    heads: Span

    def holds(self, other: _Part) -> bool:
        return all(a <= c and d <= b for (a, b), (c, d) in zip(self, other, strict=True))


class _KeyBox(NamedTuple):
    part: _Part
    positions: Span
    rank: int


class _Piece(NamedTuple):
    """Keys that lie on this rank in a round."""

    number: int  # of the tensor
    part: _Part  # of the tensor
    begin: int  # the position of the tensor's first key
    positions: Span
    is_own: bool = False

    def serves(self, part: _Part) -> bool:
        """Whether queries of these samples and heads take the piece: what came for others may hold their keys, too."""
        return self.part.holds(part) if self.is_own else self.part == part


@lru_cache(maxsize=256)
def make_block_plan(query: Layout, key: Layout, sizes: AttentionSizes, rank: int) -> BlockPlan | None:
    """The plan for sharded queries and keys in these layouts; None where a box has a part of a group of heads.

    Layouts are of tensors of samples, heads, positions and width, and cut no width.
    """
    if key.size[1] == 0 or query.size[1] % key.size[1]:
        return None
    group = query.size[1] // key.size[1]
    boxes = query.boxes
    if (boxes.offsets[:, 1] % group).any() or (boxes.ends[:, 1] % group).any():
        return None
    keys = [_KeyBox(_Part(*box[:2]), box[2], owner) for box, owner in zip(_spans(key), key.ranks.tolist(), strict=True)]
    needs = _needs(query, group, key.size[2], sizes)
    transport = transport_layout(key, sizes.width)
    rounds = [AttentionRound(None, tuple(_tasks(query, group, key.size[2], sizes, rank, _own_pieces(keys, key, rank))))]
    for layout in _round_layouts(query, needs, keys, transport, sizes):
        plan = make_plan(transport, layout)
        pieces = [
            _Piece(number, _Part(box[0], box[2]), box[1][0], box[1])
            for number, box in enumerate(_spans(layout.chosen(np.array(layout.rows_on(rank), dtype=np.int64))))
        ]
        rounds.append(AttentionRound(plan, tuple(_tasks(query, group, key.size[2], sizes, rank, pieces))))
    return BlockPlan(tuple(rounds))


def _spans(layout: Layout) -> list[list[Span]]:
    """Of each box, from where to where it goes in each dim."""
    both = np.stack([layout.boxes.offsets, layout.boxes.ends], axis=2).tolist()
    return [[(begin, end) for begin, end in box] for box in both]


def _by_visibility(samples: Span, sizes: AttentionSizes) -> Iterator[tuple[Span, Visibility]]:
    """Samples whose queries see by the same rule."""
    if len(sizes.visibilities) == 1:
        yield samples, sizes.visibilities[0]
    else:
        for sample in range(*samples):
            yield (sample, sample + 1), sizes.visibilities[sample]


# What each rank needs ------------------------------------------------------------------------------------------------


def _needs(query: Layout, group: int, length: int, sizes: AttentionSizes) -> dict[tuple[int, _Part], list[Span]]:
    """By rank, samples and heads, the keys that the rank's queries see, in order."""
    found: dict[tuple[int, _Part], list[Span]] = {}
    for (samples, heads, queries, _), rank in zip(_spans(query), query.ranks.tolist(), strict=True):
        if heads[0] >= heads[1]:
            continue
        for few, visibility in _by_visibility(samples, sizes):
            if few[0] < few[1]:
                part = _Part(few, (heads[0] // group, heads[1] // group))
                found.setdefault((rank, part), []).extend(visibility.spans_seen(queries, length))
    return {where: _merged(spans) for where, spans in found.items()}


def _merged(spans: Iterable[Span]) -> list[Span]:
    """The union of spans, in order."""
    made: list[Span] = []
    for begin, end in sorted(spans):
        if begin >= end:
            continue
        if made and begin <= made[-1][1]:
            made[-1] = made[-1][0], max(made[-1][1], end)
        else:
            made.append((begin, end))
    return made


def _without(spans: Sequence[Span], taken: Sequence[Span]) -> list[Span]:
    """What spans have beside those that are taken; both are in order."""
    left: list[Span] = []
    for first, end in spans:
        begin = first
        for a, b in taken:
            if b <= begin or a >= end:
                continue
            if begin < a:
                left.append((begin, a))
            begin = b
        if begin < end:
            left.append((begin, end))
    return left


# Rounds --------------------------------------------------------------------------------------------------------------


def transport_layout(key: Layout, width: int) -> Layout:
    """The layout of keys, and of what travels with each, on their way: samples, positions, heads and width."""
    order, boxes = [0, 2, 1, 3], key.boxes
    extents = boxes.sizes[:, order].copy()
    extents[:, 3] = width
    size = [key.size[0], key.size[2], key.size[1], width]
    return Layout.of(size, Boxes(boxes.offsets[:, order], extents), key.places)


def _round_layouts(
    query: Layout,
    needs: dict[tuple[int, _Part], list[Span]],
    keys: Sequence[_KeyBox],
    transport: Layout,
    sizes: AttentionSizes,
) -> Iterator[Layout]:
    """The keys that come to each rank in each round, as they travel."""
    away: dict[tuple[int, _Part], list[Span]] = {}
    by_rank: dict[int, int] = {}  # bytes
    held: dict[int, list[_KeyBox]] = {}
    for box in keys:
        held.setdefault(box.rank, []).append(box)
    for (rank, part), spans in needs.items():
        here = _merged(box.positions for box in held.get(rank, ()) if box.part.holds(part))
        away[rank, part] = _without(spans, here)
        count = sum(end - begin for begin, end in away[rank, part]) * _count(part.samples) * _count(part.heads)
        by_rank[rank] = by_rank.get(rank, 0) + count * sizes.width * sizes.itemsize
    own = transport.most_elements * sizes.itemsize
    members = sorted({*query.ranks.tolist(), *transport.ranks.tolist()})
    count = min(-(-max(by_rank.values(), default=0) // max(ROUND_BYTES, own)), len(members) - 1)
    place_of = {rank: row for row, rank in enumerate(query.ranks.tolist())}
    for chosen in _by_distance(away, keys, members, count) if count > 1 else [away]:
        rows = [(rank, part, span) for (rank, part), spans in chosen.items() for span in spans]
        if rows:
            lows = [[part.samples[0], span[0], part.heads[0], 0] for _, part, span in rows]
            extents = [[_count(part.samples), _count(span), _count(part.heads), sizes.width] for _, part, span in rows]
            places = query.places.take(np.array([place_of[rank] for rank, *_ in rows], dtype=np.int64))
            both = np.array(lows, dtype=np.int64), np.array(extents, dtype=np.int64)
            yield Layout.of(transport.size, Boxes(*both), places)


def _count(span: Span) -> int:
    return span[1] - span[0]


def _by_distance(
    away: dict[tuple[int, _Part], list[Span]], keys: Sequence[_KeyBox], members: Sequence[int], count: int
) -> list[dict[tuple[int, _Part], list[Span]]]:
    """The same keys in so many rounds: first those of the ranks next to the one that gets them."""
    number = {rank: k for k, rank in enumerate(members)}
    each = -(-(len(members) - 1) // count)  # ranks that send to a rank in a round
    rounds: list[dict[tuple[int, _Part], list[Span]]] = [{} for _ in range(count)]
    holders: dict[_Part, list[_KeyBox]] = {}
    for (rank, part), spans in away.items():
        if part not in holders:
            corner = _Part((part.samples[0], part.samples[0] + 1), (part.heads[0], part.heads[0] + 1))
            holders[part] = [box for box in keys if box.part.holds(corner)]
        left = spans
        for box in holders[part]:
            taken = [(max(a, box.positions[0]), min(b, box.positions[1])) for a, b in left]
            taken = [span for span in taken if span[0] < span[1]]
            if taken:
                distance = (number[rank] - number[box.rank] - 1) % len(members)
                at = rounds[min(distance // each, count - 1)].setdefault((rank, part), [])
                at[:] = _merged([*at, *taken])
                left = _without(left, taken)
    return rounds


# What this rank computes ---------------------------------------------------------------------------------------------


def _own_pieces(keys: Sequence[_KeyBox], key: Layout, rank: int) -> list[_Piece]:
    """The keys that lie here, each once."""
    made: list[_Piece] = []
    taken: dict[_Part, list[Span]] = {}
    for number, row in enumerate(key.rows_on(rank)):
        part, positions, _ = keys[row]
        before = taken.setdefault(part, [])
        made += [_Piece(number, part, positions[0], span, is_own=True) for span in _without([positions], before)]
        before[:] = _merged([*before, positions])
    return made


def _tasks(
    query: Layout, group: int, length: int, sizes: AttentionSizes, rank: int, pieces: Sequence[_Piece]
) -> Iterator[BlockTask]:
    """The blocks of this rank's queries with these keys."""
    rows = query.rows_on(rank)
    for number, (samples, heads, queries, _) in enumerate(_spans(query.chosen(np.array(rows, dtype=np.int64)))):
        for few, visibility in _by_visibility(samples, sizes):
            part = _Part(few, (heads[0] // group, heads[1] // group))
            if few[0] >= few[1] or heads[0] >= heads[1]:
                continue
            for piece in pieces:
                if not piece.serves(part):
                    continue
                for block in blocks_of(visibility, queries, piece.positions, length):
                    for few_queries in _rows_of(block.queries, block.keys, sizes):
                        yield BlockTask(
                            number,
                            piece.number,
                            few,
                            part.heads,
                            few_queries,
                            block.keys,
                            (_slice(few, samples[0]), slice(None), _slice(few_queries, queries[0])),
                            (
                                _slice(few, piece.part.samples[0]),
                                _slice(part.heads, piece.part.heads[0]),
                                _slice(block.keys, piece.begin),
                            ),
                            block.band,
                        )


def _rows_of(queries: Span, keys: Span, sizes: AttentionSizes) -> Iterator[Span]:
    """Queries in parts whose masks are small."""
    step = max(MASKED // _count(keys), 1) if sizes.has_mask else _count(queries)
    for begin in range(*queries, step):
        yield begin, min(begin + step, queries[1])


def _slice(span: Span, offset: int) -> slice:
    return slice(span[0] - offset, span[1] - offset)
