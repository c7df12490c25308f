"""Ranks that are threads of one process, in the groups that torch's own tests use."""

from __future__ import annotations

import io
import threading
import traceback
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from tests.cases import ALL, PLAIN, SIZE, assert_close, chunks, holds, places
from tests.patience import PATIENT
from torch import nn

import shardwise
from shardwise import ChunkShardingSpec, ShardedOptimizer, ShardingPlan, shard_module
from shardwise.tensor import Shard, shard_tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.distributed import multi_threaded_pg as threaded


def on_threads(count: int, body: Callable[[], None]) -> None:
    """Run this on so many ranks, each a thread; raise what the first of them raises."""
    failures: dict[int, str] = {}
    store = dist.HashStore()

    def rank_thread(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=count, store=store)
        try:
            body()
        except BaseException as error:
            failures[rank] = traceback.format_exc()
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        threads = [threading.Thread(target=rank_thread, args=(rank,), daemon=True) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENT)
        alive = [thread.is_alive() for thread in threads]
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    assert not failures, "\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
    assert not any(alive), "a rank hangs"


def test_tensors_move_and_compute() -> None:
    """Every layout: factories, gather, resharding, ops that are remembered, gradients."""

    def body() -> None:
        for name, spec in ALL.items():
            assert len(shardwise.randn(spec, *SIZE).metadata().shards_metadata) == len(spec.layout(SIZE))
            plain = PLAIN.double()
            tensor = shard_tensor(plain, spec).requires_grad_()
            assert holds(tensor, plain), name
            assert torch.equal(tensor.full_tensor().detach(), plain)
            out = torch.empty_like(plain) if dist.get_rank() == 1 else None
            tensor.detach().gather(1, out)
            assert out is None or torch.equal(out, plain)
            for _ in range(3):
                tensor.grad = None
                result = (tensor * 2).sum(0) @ plain.t()
                assert_close(result.full_tensor().detach(), (plain * 2).sum(0) @ plain.t())
                result.sum().backward()
                assert_close(tensor.grad.full_tensor(), plain.sum(0).expand(SIZE) * 2)
            assert holds(tensor.detach().reshard(chunks(1, 3, 0, 2)), plain)

    on_threads(4, body)


def test_sub_groups_of_threads_with_and_without_data() -> None:
    """Made by the group's own ranks alone; on cpu and on meta; modules, optimizers and pickles in the whole world."""

    def body() -> None:
        mine = [0, 1] if dist.get_rank() < 2 else [2, 3]
        group = dist.new_group(mine, use_local_synchronization=True)
        for kind in ("cpu", "meta"):
            spec = ChunkShardingSpec(0, places(*mine, device=kind))
            zeros = shardwise.zeros(spec, *SIZE, process_group=group)
            tensor = shard_tensor(PLAIN.to(kind), spec, process_group=group)
            assert zeros.device.type == (tensor + 1).device.type == tensor.sum().device.type == kind
            local = torch.zeros(2, 2, device=kind)
            shard = Shard.from_tensor_and_offsets(local, [2 * dist.get_rank(group), 0], dist.get_rank())
            made = shardwise.tensor.init_from_local_shards([shard], 4, 2, process_group=group)
            assert [each.placement.rank() for each in made.metadata().shards_metadata] == mine
            module = nn.Linear(6, 4, device=kind)
            shard_module(module, ShardingPlan({"weight": spec}), process_group=group)
            assert module.weight.device.type == kind
            assert kind == "meta" or torch.equal(tensor.full_tensor(), PLAIN)
        plain, sharded = nn.Linear(6, 5, dtype=torch.float64), nn.Linear(6, 5, dtype=torch.float64)
        nn.init.ones_(plain.weight), nn.init.ones_(plain.bias)
        sharded.load_state_dict(plain.state_dict())
        shard_module(sharded, ShardingPlan({"weight": chunks(0, 0, 1, 2, 3)}))
        steps = torch.optim.Adam(plain.parameters()), ShardedOptimizer(sharded.named_parameters(), torch.optim.Adam)
        for _ in range(3):
            for layer, step in zip((plain, sharded), steps, strict=True):
                layer(PLAIN.double()).pow(2).sum().backward()
                step.step()
                step.zero_grad()
        file = io.BytesIO()
        torch.save(sharded.state_dict(), file)
        file.seek(0)
        assert_close(torch.load(file, weights_only=True)["weight"].full_tensor(), plain.weight.detach())

    on_threads(4, body)
