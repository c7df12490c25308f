"""Ranks that die while a live training moves, and workers that leave a world and join another one with new numbers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.patience import PATIENT
from tests.state_transfer.short_training import train, training, twin_losses
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardwise
from shardwise import ChunkShardingSpec, GridShardingSpec
from shardwise.comm.transfer import wire
from shardwise.errors import ProcessGroupError, RankMismatchError, StateMismatchError, TransferError
from shardwise.state_transfer import StateTransfer
from shardwise.testing import ranks

# The rows in two halves, each on two ranks.
IN_HALVES = GridShardingSpec([None, 0], [["rank:0/cpu", "rank:1/cpu"], ["rank:2/cpu", "rank:3/cpu"]])
PLAIN = torch.arange(12.0).reshape(6, 2)


def spec(dim: int, *members: int) -> ChunkShardingSpec:
    """Cut along a dim, over these ranks."""
    return ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in members])


@ranks(3)
def test_a_process_is_known_by_its_boxes() -> None:
    """Whatever its number is now. Two that have the same are one too many; one that has none is not asked."""
    here = dist.get_rank()
    rows = shardwise.shard(PLAIN, spec(0, 0, 1, 2))
    turned = [1, 2, 0]  # what each rank was: here, as if the world had been made anew

    def as_rank(number: int) -> Any:
        """The tensor as that rank has it, without a message."""
        frame = rows._frame
        own = PLAIN[2 * number : 2 * number + 2]
        held = type(frame).of(frame.layout, frame.spec, frame.layout.rows_on(number), frame.dtype, frame.process_group)
        made = rows._derived(held, [own], None)
        return {"rows": made, "plain": torch.ones(2)}

    def new() -> dict[str, Any]:
        return {"rows": shardwise.zeros(spec(1, 2, 0), 6, 2), "plain": torch.zeros(2)}

    moved = shardwise.resize(as_rank(turned[here]), new())
    assert torch.equal(moved["rows"].full_tensor(), PLAIN)
    assert moved["plain"].sum() == 2
    with pytest.raises(ProcessGroupError, match="ranks 0 and 1 both have the boxes of rank 0 of the old state"):
        shardwise.resize(as_rank([0, 0, 1][here]), new())
    outside = shardwise.zeros(spec(0, 1), 4, 2)
    other = {"rows": shardwise.zeros(spec(0, 2), 4, 2)}
    assert shardwise.resize({"rows": outside}, other)["rows"].sum().item() == 0


def die(*_: Any) -> None:
    """As a machine without power does."""
    os.kill(os.getpid(), signal.SIGKILL)


def memory_of(state: dict[str, Any]) -> list[torch.Tensor]:
    """All that is here of the parameters and of the optimizer's state, as copies."""
    kept = [value for entry in state["optimizer"].state.values() for value in entry.values()]
    tensors = [*state["model"].parameters(), *(value for value in kept if isinstance(value, torch.Tensor))]
    return [
        local.detach().clone()
        for tensor in tensors
        for local in (tensor._local_tensors() if isinstance(tensor, shardwise.ShardedTensor) else [tensor])
    ]


def join_world(port: int, name: str, rank: int, size: int) -> None:
    """Make the world of this process, by a store that outlives every rank."""
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def breaks_off(old: dict[str, Any], new: Any, group: ProcessGroup | None, lost: list[int], gone: int) -> None:
    """Resize with ranks of which one dies: the error says so, and the old state is as it was."""
    before = memory_of(old)
    given = old if "model" in new else {"weight": old["model"][0].weight.detach(), "step": old["step"]}
    with pytest.raises(TransferError, match=f"rank {gone} is gone") as found:
        shardwise.resize(given, new, lost=lost, max_bytes=2**12, process_group=group)
    assert "the old one is as it was" in str(found.value)
    after = memory_of(old)
    assert len(before) == len(after) > 4
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def on_four_ranks(rank: int, port: int) -> None:
    """Ranks 3 and 2 die in the middle of a resize, one after the other; 1 and 0 go on with a process that is new."""
    expected = twin_losses(6)
    old, halves = None, None
    if rank < 4:
        join_world(port, "first", rank, 4)
        halves = distribute_tensor(PLAIN, init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)])
        old = training({"0.weight": IN_HALVES, "2.weight": None, "2.bias": IN_HALVES})
        assert train(old, 3) == pytest.approx(expected[:3], rel=1e-12)

        with pytest.MonkeyPatch.context() as patch:
            if rank == 3:
                patch.setattr(wire.GroupWire, "exchange", die)
            # Rank 0 has all that it is to get, and nobody wants what it has.
            apart = GridShardingSpec([None, 0], [["rank:0/cpu", "rank:2/cpu"], ["rank:1/cpu", "rank:3/cpu"]])
            breaks_off(old, training({"0.weight": apart}), None, [], gone=3)

        left = dist.new_group([0, 1, 2], use_local_synchronization=True)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 2:
                run = StateTransfer.run
                patch.setattr(StateTransfer, "run", lambda self: die(run(self)))
            weight = shardwise.zeros(spec(1, 2, 1, 0), 12, 8, dtype=torch.float64, process_group=left)
            # Nothing but tensors, which have all arrived when the rank dies.
            breaks_off(old, {"weight": weight, "step": 0}, left, [3], gone=2)
        dist.destroy_process_group()

    number = {1: 0, 4: 1, 0: 2}[rank]
    join_world(port, "second", number, 3)
    new = training({"0.weight": spec(1, 0, 1, 2), "0.bias": spec(0, 1), "2.weight": spec(0, 2, 0)})
    with pytest.raises(ProcessGroupError, match=r"has boxes on rank 2, which is not in the group.*lost=\[2\]"):
        shardwise.resize(old, new, lost=[3])
    moved = {**new, "halves": torch.zeros_like(PLAIN)}
    assert shardwise.resize(old and {**old, "halves": halves}, moved, lost=[2, 3]) is moved
    assert torch.equal(moved["halves"], PLAIN)
    new["step"] = moved["step"]
    assert (new["step"], new["scheduler"].last_epoch) == (3, 3)
    assert train(new, 3) == pytest.approx(expected[3:], rel=1e-12)
    weight, again = new["model"][0].weight.detach(), training({"0.weight": spec(0, 2, 1)})["model"]
    transfer = StateTransfer({"0.weight": weight}, again, strict=False)
    with pytest.raises(RankMismatchError, match=r"out of step.*StateTransfer\.run"):  # and not after the time limit
        weight.full_tensor() if rank == 4 else transfer.run()
    with pytest.raises(StateMismatchError, match=r"'halves' is .*, which is not what its layout says"):
        StateTransfer(None if halves is None else {"halves": halves}, {"halves": moved["halves"]})


def test_ranks_that_die_while_tensors_move() -> None:
    """All others raise soon that it is gone, also those that had nothing to do with it; their old state is whole, and
    moves to a world in which they have other numbers, and a new process is among them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=on_four_ranks, args=(rank, store.port)) for rank in range(5)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(PATIENT)
        assert [process.exitcode for process in processes] == [0, 0, -signal.SIGKILL, -signal.SIGKILL, 0]
    finally:
        for process in processes:
            process.kill()


def test_workers_of_torchrun_leave_and_join(tmp_path: Path) -> None:
    """One of two workers leaves a training; the other goes on with a worker of another torchrun, and is the second
    one of them: fewer, then more, and the losses are those of one process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    script = str(Path(__file__).parent / "joining_workers.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def start(count: int, kind: str) -> tuple[subprocess.Popen[bytes], Path]:
        out = tmp_path / kind
        options = ["--standalone", f"--nproc-per-node={count}", script, kind, str(store.port), str(out)]
        with (tmp_path / f"{kind}.log").open("wb") as log:
            command = [sys.executable, "-m", "torch.distributed.run", *options]
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment), out

    jobs = [start(2, "trainers"), start(1, "newcomers")]
    try:
        for job, _ in jobs:
            job.wait(PATIENT)
    finally:
        for job, _ in jobs:
            job.terminate()
            job.wait()
    logs = [(tmp_path / f"{kind}.log").read_text()[-3000:] for kind in ("trainers", "newcomers")]
    assert [job.returncode for job, _ in jobs] == [0, 0], "\n".join(logs)
    expected = twin_losses(6)
    for _, out in jobs:
        losses = list(map(float, out.read_text().split()))
        assert losses == pytest.approx(expected[-len(losses) :], rel=1e-12)
        assert len(losses) == (6 if out.name == "trainers" else 2)
