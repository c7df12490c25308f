"""States of all kinds on real ranks, from anywhere to anywhere: values, bytes and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.state_transfer.states import MESHES, WORLD, Pair, expected_boxes, local_boxes, pairs
from torch.distributed import DeviceMesh

from shardwise import StateTransfer
from shardwise.comm.transfer import copies, segments
from shardwise.state_transfer.explaining import Account
from shardwise.testing import run_on_ranks

_meshes: dict[str, DeviceMesh] = {}


def meshes() -> dict[str, DeviceMesh]:
    """Made once in a process: each is several process groups."""
    if not _meshes:
        _meshes.update({name: DeviceMesh("cpu", ranks) for name, ranks in MESHES.items()})
    return _meshes


@contextmanager
def small_segments(least: int, alone: int) -> Iterator[None]:
    """Limits at which tiny states take many rounds, in messages of both kinds, which a thread packs ahead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "LEAST", least)
        patch.setattr(segments, "ALONE", alone)
        patch.setattr(segments, "ALONE_IF_CROWDED", alone)
        patch.setattr(copies, "WORTH_A_THREAD", 0)
        yield


def bits(tensor: torch.Tensor) -> bytes:
    """The memory of a tensor, whatever its dtype."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def fill(given: Mapping[str, Any], plain: Mapping[str, torch.Tensor], pair: Pair) -> None:
    """Write new values into the sources where they are."""
    for name, tensor in given.items():
        boxes = expected_boxes(plain[name], pair.sources[name].layout(meshes()), dist.get_rank())
        for local, box in zip(local_boxes(tensor), boxes, strict=False):
            local.copy_(box)


def check_arrived(pair: Pair, run: int, given: Mapping[str, Any], handed: dict[str, list[torch.Tensor]]) -> None:
    """What is here of each target is what it must be, by the byte."""
    for name, plain in pair.plain_targets(run).items():
        held = pair.targets[name]
        boxes = list(expected_boxes(plain, held.layout(meshes()), dist.get_rank()))
        found = handed.pop(name, []) if held.bare else local_boxes(given.get(name))
        assert len(found) == len(boxes) or not any(box.numel() for box in boxes), (name, len(found), len(boxes))
        for one, other in zip(found, boxes, strict=False):
            assert (one.dtype, bits(one)) == (other.dtype, bits(other)), (run, name)
    assert not handed


def check_bytes(pair: Pair, transfer: StateTransfer) -> None:
    """Every rank gets what it must and no more; all ranks know that of each other; the buffers are as small as said."""
    planned, here = transfer._planned, dist.get_rank()
    received = [segment for one in planned.load.rounds for _, segment in one.receives]
    pieces = [piece for segment in received for piece in planned.load.receives.of(segment)]
    assert sum(piece.nbytes for piece in pieces) == pair.bound(here, meshes())
    account = Account(planned, range(WORLD))
    assert account.between.sum(0).tolist() == [pair.bound(rank, meshes()) for rank in range(WORLD)]
    assert account.bound == account.between.sum()
    least = segments.LEAST * segments.SLOTS * 2 * (WORLD - 1)
    assert transfer._rounds.buffered <= max(pair.options["max_bytes"], least)


def move(pair: Pair, least: int, alone: int) -> None:
    """On every rank: there, twice."""
    here = meshes()
    before = {name: held.given(pair.plain_sources(0)[name], here) for name, held in pair.sources.items()}
    after = {name: held.given(torch.full(held.size, 77).to(held.dtype), here) for name, held in pair.targets.items()}
    sources, targets = ({n: t for n, t in side.items() if t is not None} for side in (before, after))
    handed: dict[str, list[torch.Tensor]] = {}

    def on_arrival(name: str, boxes: list[torch.Tensor]) -> None:
        assert name not in handed
        handed[name] = boxes

    with small_segments(least, alone):
        transfer = StateTransfer(sources, targets, recipe=pair.recipe, on_arrival=on_arrival, **pair.options)
        check_bytes(pair, transfer)
        for run in range(3):
            if run:
                fill(sources, pair.plain_sources(run), pair)
            handle = transfer.run(wait=run != 2)
            if handle is not None:
                total = torch.ones(3)
                dist.all_reduce(total)  # while it is under way
                assert total.tolist() == [WORLD] * 3
                handle.wait()
            check_arrived(pair, run, targets, handed)
        assert transfer.version == 3


def move_all(some: list[tuple[Pair, int, int]]) -> None:
    """One after the other, on one pool."""
    for each in some:
        move(*each)


@given(st.lists(st.tuples(pairs(), st.sampled_from([64, 1024]), st.sampled_from([32, 2**16])), min_size=4, max_size=4))
@settings(
    max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)  # each failure costs a pool
def test_any_state_becomes_any_other(some: list[tuple[Pair, int, int]]) -> None:
    """Layouts, plain tensors and DTensors of one to four ranks, fused and cut by random recipes, in other dtypes."""
    run_on_ranks(WORLD, move_all, some)
