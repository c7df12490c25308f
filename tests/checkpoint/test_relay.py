"""Reading once and sending: each byte is read by one rank, and everybody gets what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cases import ALL, PLAIN, SIZE, boxes, chunks, holds
from tests.checkpoint.files import file_of
from tests.checkpoint.test_storage import Counting, only_data
from tests.layout.grids import layouts

import shardwise
from shardwise import ShardingSpec, zeros
from shardwise.checkpoint import relay
from shardwise.checkpoint.archive import StoredTensor, blocks
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.relay import ReadCosts, rounds_of
from shardwise.layout import Layout
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks


def small(patch: pytest.MonkeyPatch, *, block: int = 64, part: int = 128, most: int = 256) -> None:
    """Blocks, parts and rounds of so many bytes; and everything is relayed."""
    patch.setattr(blocks, "BLOCK", block)
    patch.setattr(relay, "WORTH", 1)
    patch.setattr(relay, "PART", part)
    patch.setattr(relay, "ROUND", most)
    patch.setattr(ReadCosts, "of", staticmethod(lambda storage, hosts: ReadCosts(1.0, 1e9, hosts)))
    blocks._blocks.cache_clear()


@ranks(4)
def test_each_byte_is_read_once(tmp_path: Path) -> None:
    """Rows as columns, and replicas where reading is dear: all ranks together read what there is once, and no more."""
    plain = torch.arange(2048 * 1024, dtype=torch.float32).reshape(2048, 1024)
    shardwise.save({"w": shard_tensor(plain, chunks(0, 0, 1, 2, 3))}, tmp_path / "checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        for target in (
            zeros(chunks(1, 2, 0, 3, 1), 2048, 1024),
            zeros(ALL["replicated"], 2048, 1024),
            torch.zeros(2048, 1024),
        ):
            place = Counting(tmp_path / "checkpoint")
            with only_data(place):
                shardwise.load({"w": target}, place)
            read = torch.tensor([place.data()[1]])
            dist.all_reduce(read)
            assert int(read) == plain.nbytes
            assert torch.equal(target, plain) if type(target) is torch.Tensor else holds(target, plain)
            of_store = staticmethod(lambda storage, hosts: ReadCosts(4.0, 4.0, hosts))
            patch.setattr(ReadCosts, "of", of_store)


SOME: dict[str, ShardingSpec] = {
    **ALL,
    "four in one": boxes(([0, 0], [2, 6], 3), ([2, 0], [2, 6], 3), ([4, 0], [3, 3], 3), ([4, 3], [3, 3], 1)),
}


@ranks(4)
def test_relays_from_any_layout_to_any_other(tmp_path: Path) -> None:
    """In one round or many, checked or not, into another dtype, into plain tensors and ones with strides."""
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        state = {name: shard_tensor(PLAIN + number, spec) for number, (name, spec) in enumerate(SOME.items())}
        shardwise.save({"sharded": state, "plain": PLAIN * 2}, tmp_path / "checkpoint")
        blocks._blocks.cache_clear()
        rounds = 0
        for number, (name, spec) in enumerate(SOME.items()):
            small(patch, part=(48, 128, 4096)[number % 3], most=(64, 256, 10**6)[number % 3])
            dtype = (torch.float32, torch.float64)[number % 2]
            found = {other: zeros(spec, SIZE, dtype=dtype) for other in SOME}
            target: dict[str, Any] = {"sharded": found, "plain": torch.zeros(6, 7, dtype=dtype).t()}
            with pytest.MonkeyPatch.context() as inner:
                rounds += count_relays(
                    inner,
                    lambda target=target, n=number: shardwise.load(
                        target, tmp_path / "checkpoint", convert=True, verify=n % 2 == 0
                    ),
                )
            for other_number, other in enumerate(SOME):
                assert holds(found[other], (PLAIN + other_number).to(dtype)), (name, other)
            assert torch.equal(target["plain"], (PLAIN * 2).to(dtype))
        assert rounds > 3 * len(SOME)
    blocks._blocks.cache_clear()


def count_relays(patch: pytest.MonkeyPatch, work: Any) -> int:
    """How many rounds of relays there are in something."""
    found, real = [0], relay.Relay.fill

    def counted(self: Any, *args: Any, **options: Any) -> None:
        found[0] += len(self.rounds)
        real(self, *args, **options)

    patch.setattr(relay.Relay, "fill", counted)
    work()
    return found[0]


@ranks(4)
def test_relays_on_some_of_the_ranks(tmp_path: Path) -> None:
    """In a group whose ranks are in another order; damage is told on all of them."""
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        shardwise.save({"w": shard_tensor(PLAIN, ALL["chunk dim 0"])}, tmp_path / "checkpoint")
        group = dist.new_group([1, 3])
        if dist.get_rank() in (1, 3):
            target = zeros(chunks(1, 3, 1), SIZE, process_group=group)
            with pytest.MonkeyPatch.context() as inner:
                assert count_relays(
                    inner, lambda: shardwise.load({"w": target}, tmp_path / "checkpoint", process_group=group)
                )
            assert holds(target, PLAIN)
        dist.barrier()
        file = file_of(tmp_path / "checkpoint", 2)
        if dist.get_rank() == 0:
            content = bytearray(file.read_bytes())
            content[8 + int.from_bytes(content[:8], "little") + 5] ^= 1
            file.write_bytes(content)
        dist.barrier()
        with pytest.raises(
            shardwise.errors.CheckpointError, match=r"of tensor 'w' in file 'rank-00002.*not what was written"
        ):
            shardwise.load({"w": zeros(ALL["chunk dim -1"], SIZE)}, tmp_path / "checkpoint")
    blocks._blocks.cache_clear()


@st.composite
def stored_and_wanted(draw: st.DrawFn) -> tuple[StoredTensor, Layout]:
    """A tensor in files, and who needs what of it."""
    size = draw(st.lists(st.integers(1, 7), max_size=3).map(tuple))
    return StoredTensor("w", torch.int32, torch.Size(size), draw(layouts(size)).once), draw(layouts(size))


@settings(max_examples=100)
@given(
    stored_and_wanted(), st.sampled_from([4, 16, 200]), st.sampled_from([4, 30, 500]), st.sampled_from([8, 60, 10**6])
)
def test_rounds_make_up_the_tensor(pair: tuple[StoredTensor, Layout], block: int, part: int, most: int) -> None:
    """Every element is read once, by a rank that takes part, and no rank reads more in a round than it may, but for a
    part that is larger by itself."""
    stored, wanted = pair
    everyone = (100, *sorted(set(wanted.ranks.tolist()), key=lambda rank: rank * 5 % 7))
    with pytest.MonkeyPatch.context() as patch:
        small(patch, block=block, part=part, most=most)
        rounds = list(rounds_of(stored, wanted, Ranks(None, 0, everyone, "load")))
    blocks._blocks.cache_clear()
    seen = np.zeros(tuple(stored.size), dtype=np.int64)
    for read in rounds:
        load: dict[int, list[int]] = {}
        rows = zip(read.boxes.offsets.tolist(), read.boxes.sizes.tolist(), read.ranks.tolist(), strict=True)
        for offsets, sizes, rank in rows:
            seen[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
            load.setdefault(rank, []).append(4 * int(np.prod(sizes)))
        assert set(load) <= set(everyone)
        assert all(sum(each) <= most or len(each) == 1 for each in load.values())
    assert (seen == 1).all()
