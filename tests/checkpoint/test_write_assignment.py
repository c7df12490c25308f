"""Who writes what: every element once, by a rank that has it, and about as much by each, in whatever layouts."""

from __future__ import annotations

from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cases import chunks, places
from tests.layout.grids import layouts, spelled

from shardwise import GridShardingSpec, ReplicatedShardingSpec
from shardwise.checkpoint.archive.index_file import FileRecord, box_key, file_name, parse_index, write_index
from shardwise.checkpoint.draft import draft_file, draft_stored_tensors
from shardwise.checkpoint.write_assignment import Source, WriteAssignment
from shardwise.errors import CheckpointError
from shardwise.layout import Layout

FILE = 2**40  # bytes that a file is said to have


def sources_of(found: list[Layout | tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Source]:
    """A tensor of each layout, and one that is plain of each size."""
    known = [(one.size, one) if isinstance(one, Layout) else (torch.Size(one), None) for one in found]
    return [Source(f"t{k}", dtype, size, layout) for k, (size, layout) in enumerate(known)]


SIZES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@given(
    st.lists(st.one_of(layouts(), layouts().map(spelled), SIZES), min_size=1, max_size=6),
    st.integers(1, 64),
    st.integers(1, 64),
    st.randoms(use_true_random=False),
)
@settings(max_examples=300, deadline=None)
def test_every_element_is_written_once_by_who_has_it(
    found: list[Layout | tuple[int, ...]], smallest: int, block: int, random: Random
) -> None:
    """Grids, boxes without a rule, replicas, several boxes per rank, plain; and the index says where each part is."""
    sources = sources_of(found)
    ranks = sorted({0, *(rank for one in found if isinstance(one, Layout) for rank in one.ranks.tolist())})
    random.shuffle(ranks)
    sizes = (
        patch("shardwise.checkpoint.write_assignment.SMALLEST", smallest),
        patch("shardwise.checkpoint.archive.blocks.BLOCK", block),
    )
    with sizes[0], sizes[1]:
        sharing = WriteAssignment(sources, ranks)
        dealt = sharing.of_all()
        assert list(dealt) == ranks
        written = [np.zeros(tuple(source.size), dtype=int) for source in sources]
        for rank, parts in dealt.items():
            assert parts == sharing.of_rank(rank)
            for part in parts:
                index = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.sizes, strict=True))
                written[part.source][index] += 1
                layout = sources[part.source].layout
                if layout is not None:
                    assert part.row in layout.rows_on(rank)
                    inside = np.zeros(tuple(layout.size), dtype=bool)
                    inside[layout.index(part.row)] = True
                    assert inside[index].all()
        assert all((one == 1).all() for one in written)
        drafts = {rank: draft for rank in ranks if (draft := draft_file("0" * 16, sources, ranks, rank)) is not None}
        stored = draft_stored_tensors(sources, ranks, {rank: number for number, rank in enumerate(drafts)})
        files = [FileRecord(file_name(rank, "0" * 16), FILE, 0) for rank in drafts]
        state: Any = {"dict": [[one.name, {"tensor": one.name}] for one in stored]}
        index_again = parse_index(write_index("0" * 16, files, stored, state), "here")
        keys: dict[int, set[str]] = {rank: set() for rank in drafts}
        for tensor in index_again.tensors.values():
            for row in tensor.layout.pattern.filled.tolist():
                box = tensor.layout.at([row])
                key = box_key(tensor.name, tensor.size, box.offsets[0].tolist(), box.sizes[0].tolist())
                keys[list(drafts)[int(tensor.layout.ranks[row])]].add(key)
        assert keys == {rank: set(draft.parts) for rank, draft in drafts.items()}


@given(st.lists(st.integers(1, 400), min_size=1, max_size=30), st.integers(0, 3000), st.integers(1, 9))
@settings(deadline=None)
def test_all_write_about_as_much(lengths: list[int], alone: int, world: int) -> None:
    """Where one has something of its own, the others write more of what all have, as far as there is any."""
    sources = [*sources_of([(length,) for length in lengths], torch.uint8)]
    if alone:
        sources.append(Source("alone", torch.uint8, torch.Size([alone]), chunks(0, 0).layout([alone])))
    with patch("shardwise.checkpoint.write_assignment.SMALLEST", 8):
        dealt = WriteAssignment(sources, range(world)).of_all()
    loads = [sum(part.sizes[0] for part in dealt[rank]) for rank in range(world)]
    fair = max((sum(lengths) + alone) / world, 0)
    shared = sum(lengths) / max(world - 1, 1) if alone > fair else fair
    assert max(loads) <= max(alone + 16, shared + 17)


def test_replicas_stay_whole_and_are_told_by_a_rule() -> None:
    """Of a model replicated over the rows of a grid, most tensors are written whole by one row, and none cut often."""
    spec = GridShardingSpec((None, 0), [places(0, 1, 2), places(3, 4, 5)])
    sources = sources_of([spec.layout((300 + k, 1000)) for k in range(40)])
    stored = draft_stored_tensors(sources, range(6), {rank: rank for rank in range(6)})
    assert sorted(len(tensor.layout) for tensor in stored) == [3] * 39 + [6]
    drafts = [draft_file("0" * 16, sources, range(6), rank) for rank in range(6)]
    loads = [0 if draft is None else draft.size for draft in drafts]
    assert max(loads) < 1.01 * sum(loads) / 6


def test_a_holder_outside_of_the_group() -> None:
    """Is not needed if another one is inside; else the error names what is lost."""
    replicated = ReplicatedShardingSpec(places(0, 1, 2)).layout((4, 4))
    for layout in (replicated, spelled(replicated)):
        assert [len(parts) for parts in WriteAssignment(sources_of([layout]), [2, 3]).of_all().values()] == [1, 0]
        with pytest.raises(CheckpointError, match=r"\[0:4, 0:4\] of 't0' lies on rank:0/cpu.* not on \[3, 4\]"):
            WriteAssignment(sources_of([layout]), [3, 4])
    with pytest.raises(CheckpointError, match=r"\[2:4, 0:4\] of 't0' lies on rank:1/cpu"):
        draft_file("0" * 16, sources_of([chunks(0, 0, 1).layout((4, 4))]), [0, 2], 0)
