"""References to the shards on other ranks, over RPC."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import rpc

from shardwise.comm.agreement import in_step
from shardwise.comm.group import rpc_workers
from shardwise.errors import RankOrderError, RpcError
from shardwise.torch_private import rpc_all_gather

if TYPE_CHECKING:
    from shardwise.tensor.tensor import ShardedTensor

T = TypeVar("T", bound="ShardedTensor")


class _Ids:
    """Ids of living tensors, by which other ranks refer to them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tensors: dict[int, weakref.ReferenceType[Any]] = {}
        self.next_id = 0

    def add(self, tensor: Any) -> int:
        with self.lock:
            number, self.next_id = self.next_id, self.next_id + 1
            self.tensors[number] = weakref.ref(tensor)
        weakref.finalize(tensor, self.tensors.pop, number, None)
        return number

    def find(self, number: int) -> Any:
        with self.lock:
            reference = self.tensors.get(number)
        tensor = None if reference is None else reference()
        if tensor is None:
            raise RpcError(f"Could not find sharded_tensor_id: {number} in map: {list(self.tensors)}")
        return tensor


ids = _Ids()


def share(tensor: T) -> T:
    """Give every rank references to every other rank's shards. All ranks of the RPC world call it."""

    def work() -> tuple[None, dict[str, object]]:
        if rpc_workers() is None:
            raise RpcError(
                "RPC Framework needs to be initialized using torch.distributed.rpc.init_rpc "
                "if init_rrefs is set to True"
            )
        group_rank, rpc_rank = dist.get_rank(), rpc.get_worker_info().id
        if group_rank != rpc_rank:
            raise RankOrderError(
                "Default ProcessGroup and RPC ranks must be the same for ShardedTensor, "
                f"found process group rank: {group_rank} and RPC rank: {rpc_rank}"
            )
        return None, {"verb": "remote shards"}

    in_step(dist.group.WORLD, work)  # type: ignore[arg-type] # set once a default group exists
    tensor._init_rrefs = True
    tensor._remote_shards = {}
    tensor._sharded_tensor_id = ids.add(tensor)
    me = rpc.get_worker_info()
    number_on = rpc_all_gather(tensor._sharded_tensor_id)
    shards = tensor.local_shards()
    sent = [
        rpc.rpc_async(worker, _receive, args=(number_on[worker.name], [rpc.RRef(s) for s in shards], me.id))
        for worker in rpc_workers() or ()
        if shards and worker.id != me.id
    ]
    torch.futures.wait_all(sent)
    rpc_all_gather(None)  # a barrier: all references have arrived
    return tensor


def _receive(number: int, shards: list[Any], rpc_rank: int) -> None:
    """Store the references to another rank's shards. Called by RPC."""
    ids.find(number)._remote_shards[rpc_rank] = shards
