"""What a transfer does besides moving: gradients, ties, modules, groups, memory, and what it hands over."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import boxes, chunks, holds, places
from torch import nn

import shardwise
from shardwise import ReplicatedShardingSpec, StateTransfer
from shardwise.state_transfer import cat, planning, stack, take
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

PLAIN = torch.arange(48.0).reshape(8, 6)
TRAIN, SERVE = chunks(0, 0, 1, 2, 3), chunks(1, 2, 3)


def received(transfer: StateTransfer) -> int:
    """Bytes that this rank gets from others."""
    load = transfer._planned.load
    segments = [segment for one in load.rounds for _, segment in one.receives]
    return sum(piece.nbytes for segment in segments for piece in load.receives.of(segment))


@ranks(4)
def test_a_trainer_and_an_engine_in_one_world() -> None:
    """Names, forms and dtypes differ; leaves that require gradients and inference tensors are written to; autograd
    knows that they changed."""
    trained = {f"layers.{k}.{name}": shard_tensor(PLAIN + k, TRAIN) for k in range(2) for name in "qkv"}
    trained |= {"old.embed": shard_tensor(PLAIN, TRAIN).requires_grad_(), "norm": torch.arange(6.0)}
    served: dict[str, Any] = {f"layers.{k}.qkv": shardwise.zeros(SERVE, 24, 6) for k in range(2)}
    served["layers.1.qkv"].requires_grad_()
    with torch.inference_mode():
        served["new.embed"] = shardwise.zeros(SERVE, 8, 6, dtype=torch.bfloat16)
    served["norm"] = nn.Parameter(torch.zeros(6))
    leaf = served["layers.1.qkv"]
    recipe = {"layers.*.qkv": cat("layers.*.q", "layers.*.k", "layers.*.v")}
    transfer = StateTransfer(trained, served, rename={"old.*": "new.*"}, recipe=recipe, max_bytes=2**16)
    watched = [served["norm"], leaf, *(shard.tensor for shard in leaf.local_shards())]
    before = [tensor._version for tensor in watched]
    for step in range(2):
        transfer.run()
        for k in range(2):
            assert holds(served[f"layers.{k}.qkv"], torch.cat([PLAIN + k + step] * 3))
        assert holds(served["new.embed"], (PLAIN + step).bfloat16())
        assert torch.equal(served["norm"].detach(), torch.arange(6.0) + step)
        with torch.no_grad():
            for tensor in trained.values():
                tensor.add_(1)
    assert all(tensor._version > version for tensor, version in zip(watched, before, strict=True))
    assert transfer.version == 2


@ranks(4)
def test_tied_weights_go_once() -> None:
    """Modules as sides: the head is the embedding, and its bytes are sent once; apart, twice."""

    class Model(nn.Module):
        def __init__(self, spec: Any, tied: bool) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)
            self.embed.weight = nn.Parameter(shard_tensor(PLAIN, spec))
            self.head.weight = self.embed.weight if tied else nn.Parameter(shard_tensor(PLAIN, spec))

    counts = []
    for tied in (True, False):
        source, target = Model(TRAIN, tied=True), Model(SERVE, tied)
        with torch.no_grad():
            source.embed.weight.mul_(2)
        transfer = StateTransfer(source, target)
        transfer.run()
        counts.append(received(transfer))
        for weight in (target.embed.weight, target.head.weight):
            assert holds(weight, PLAIN * 2)
    assert counts[1] == 2 * counts[0]
    assert (counts[0] > 0) == (dist.get_rank() >= 2)


@ranks(4)
def test_groups_and_states_that_do_not_match() -> None:
    """Only the ranks of a group take part; with strict=False, names of one side alone are left as they are."""
    group = dist.new_group([1, 2, 3])
    if dist.get_rank():
        source = shard_tensor(PLAIN, chunks(0, 3, 1), process_group=group, src_rank=0)
        target = shardwise.zeros(boxes(([0, 0], [8, 2], 2), ([0, 2], [8, 4], 1)), 8, 6, process_group=group)
        alone = torch.full((3,), 5.0)
        StateTransfer({"a": source, "b": alone}, {"a": target}, strict=False, process_group=group).run()
        assert holds(target, PLAIN)
        StateTransfer({"a": source}, {"a": target, "b": alone}, strict=False, process_group=group).run()
        assert alone.tolist() == [5.0] * 3
        only = (
            {"a": source if dist.get_rank() != 2 else source.sharding},
            {"a": target if dist.get_rank() < 3 else None},
        )
        only[1].pop("a") if dist.get_rank() == 3 else None
        StateTransfer(*only, process_group=group).run()
    dist.barrier()


@ranks(4)
def test_what_arrives_is_handed_over_and_let_go() -> None:
    """Once for each name in each run, whole; only while it is handed over does this rank have memory for it."""
    layout = chunks(0, 2, 3).layout((512, 256))
    plain = {f"w{k}": torch.rand(512, 256, dtype=torch.float64) for k in range(4)}
    for tensor in plain.values():
        dist.broadcast(tensor, 0)
    trained = {name: shard_tensor(tensor, chunks(1, 0, 1)) for name, tensor in plain.items()}
    alive: list[weakref.ref[torch.Tensor]] = []
    most, seen = 0, list[str]()

    def quantise(name: str, local: list[torch.Tensor]) -> None:
        nonlocal most
        begin = 256 * (dist.get_rank() - 2)
        assert len(local) == 1
        assert torch.equal(local[0], plain[name].float()[begin : begin + 256])
        alive.append(weakref.ref(local[0]))
        most = max(most, sum(ref() is not None for ref in alive))
        seen.append(name)

    some = dict.fromkeys(plain, layout) if dist.get_rank() > 1 else None
    for staged in (False, True):
        trained32 = {name: tensor.float() for name, tensor in trained.items()}
        transfer = StateTransfer(trained32, some, on_arrival=quantise, max_bytes=2**17, staged=staged)
        for _ in range(2):
            seen.clear()
            transfer.run()
            gc.collect()
            assert sorted(seen) == (sorted(plain) if dist.get_rank() > 1 else [])
            assert not any(ref() is not None for ref in alive)
        if not staged:
            assert most <= 2


def peak(reset: bool = False) -> int:
    """The most memory that this process has had, in bytes, since it was last set back."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


@ranks(4)
def test_memory_above_the_states_is_bounded() -> None:
    """Of 64 MiB that all move, in other dtypes and strides, so that nothing is sent as it lies."""
    source = {f"w{k}": shardwise.ones(chunks(0, 0, 1, 2, 3), 1024, 1024) for k in range(16)}
    target = {f"w{k}": shardwise.zeros(chunks(1, 3, 2, 1, 0), 1024, 1024, dtype=torch.bfloat16) for k in range(16)}
    limit = 4 * 2**20
    transfer = StateTransfer(source, target, max_bytes=limit)
    assert transfer._rounds.buffered <= limit
    assert transfer._planned.load.rounds[2:]
    for _ in range(2):
        before = peak(reset=True)
        transfer.run()
        assert peak() - before <= 2 * limit
    assert all(bool((shard.tensor == 1).all()) for t in target.values() for shard in t.local_shards())


@ranks(4)
def test_stacked_experts_in_the_background() -> None:
    """Two transfers under way at once, with ops of both kinds in between, waited for in the order of all ranks."""
    experts = {f"experts.{k}.up": shard_tensor(PLAIN * k, ReplicatedShardingSpec(places(k))) for k in range(4)}
    stacked = {"experts.up": shardwise.zeros(chunks(0, 3, 2, 1, 0), 4, 8, 6)}
    apart = {f"single.{k}.up": torch.zeros(8, 6) for k in range(4)}
    one = StateTransfer(experts, stacked, recipe={"experts.up": stack("experts.#.up")}, staged=True)
    other = StateTransfer(experts, apart, recipe={"single.#.up": take("experts.#.up")})
    handles = [one.run(wait=False), other.run(wait=False)]
    x = shard_tensor(PLAIN, TRAIN)
    assert torch.equal((x @ x.T).full_tensor(), PLAIN @ PLAIN.T)
    dist.barrier()
    for handle in handles:
        handle.wait()
        assert handle.done()
    assert holds(stacked["experts.up"], torch.stack([PLAIN * k for k in range(4)]))
    assert all(torch.equal(apart[f"single.{k}.up"], PLAIN * k) for k in range(4))
    one.run(wait=False)
    one.run()  # waits for the one before
    assert one.version == 3


@ranks(4)
def test_it_is_told_and_drawn_before_it_runs() -> None:
    """Bytes, the busiest link, and who sends to whom: alike on every rank."""
    trained = {"a": shard_tensor(PLAIN, TRAIN), "b": shard_tensor(PLAIN, TRAIN)}
    served = {"a": shardwise.zeros(SERVE, 8, 6), "b": shardwise.zeros(SERVE, 8, 6, dtype=torch.bfloat16)}
    transfer = StateTransfer(trained, served)
    said = transfer.explain(rate=1e6)
    assert "2 tensors by 2 routes: 216 B move between 4 ranks, which is the least that must; 72 B stay" in said
    assert "the busiest link is from rank 0 to rank 2: 36 B; no rank sends or gets more than 108 B" in said
    assert "rank 3 sends 36 B to rank 2, gets 108 B" in said
    lines = shardwise.draw(transfer).text().splitlines()
    assert lines[0] == "Transfer of 2 tensors between 4 ranks"
    table = [line.split() for line in lines[-4:]]
    assert table[3] == ["from", "3", "36", "B", "[36", "B]"]
    assert "Transfer of 2 tensors" in transfer._repr_html_()


@ranks(2)
def test_ranks_without_a_gpu_among_such_that_have_one() -> None:
    """Only those with one have pinned memory to give. Here one rank says that it has: its tensors are on the CPU."""
    trained, served = shard_tensor(PLAIN, chunks(0, 0, 1)), shardwise.zeros(chunks(1, 0, 1), 8, 6)
    with pytest.MonkeyPatch.context() as patch:
        found, said = planning._device_types, [{"cuda"}]
        if dist.get_rank() == 0:
            patch.setattr(planning, "_device_types", lambda sides: said.pop() if said else found(sides))
        transfer = StateTransfer({"a": trained}, {"a": served})
        assert "cuda" in transfer._planned.device_types
        transfer.run()
    assert holds(served, PLAIN)


def test_one_process_alone() -> None:
    """Without torch.distributed."""
    target = {"b": torch.zeros(6, 8, dtype=torch.float64)}
    StateTransfer({"a": PLAIN}, target, recipe={"b": take("a").T}).run()
    assert torch.equal(target["b"], PLAIN.T.double())


@ranks(2)
def test_ranks_that_share_cores_send_fewer_messages() -> None:
    """One rank that finds too few cores is enough, on all ranks: both ends cut what they send alike."""
    source, target = shard_tensor(torch.rand(512, 128), chunks(0, 0, 1)), shardwise.zeros(chunks(0, 1, 0), 512, 128)
    for found, alone in ((64, [True]), (1, [False])):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planning, "cores", lambda found=found: found if dist.get_rank() == 1 else 64)
            transfer = StateTransfer({"a": source}, {"a": target})
        for side in (transfer._planned.load.sends, transfer._planned.load.receives):
            segments = side.segments[1 - dist.get_rank()]
            assert [piece.alone for segment in segments for piece in side.of(segment)] == alone
        transfer.run()
        assert torch.equal(target.full_tensor(), source.full_tensor())
