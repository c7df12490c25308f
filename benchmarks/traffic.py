"""Bytes that a rank receives: of collectives, where they pass torch's dispatcher, and of this library's messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.tensor import placement_types
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.comm.group import TaggedMessages

# Of a collective's arguments and result, the bytes of this rank's result that came from other ranks.
Count = Callable[[Sequence[Any], Any], float]


def _exchanged(result: torch.Tensor, splits: Sequence[int], group: Any) -> float:
    """Of an all-to-all: the result, less what this rank sent to itself."""
    ranks, here = dist.get_world_size(group), dist.get_rank(group)
    own = splits[here] / max(sum(splits), 1) if splits else 1 / ranks
    return result.nbytes * (1 - own)


RECEIVED: dict[str, Count] = {
    "_c10d_functional::all_gather_into_tensor": lambda args, result: result.nbytes - args[0].nbytes,
    "_c10d_functional::reduce_scatter_tensor": lambda args, result: args[0].nbytes - result.nbytes,
    "_c10d_functional::all_to_all_single": lambda args, result: _exchanged(
        result, args[1], _resolve_process_group(args[3])
    ),
    "_dtensor::shard_dim_alltoall": lambda args, result: _exchanged(result, (), _resolve_process_group(args[3])),
    "c10d::alltoall_base_": lambda args, _: _exchanged(args[0], args[3], dist.ProcessGroup.unbox(args[2])),
}
SILENT = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")


class Received(TorchDispatchMode):
    """While it is on, adds up the bytes that this rank receives; a collective it does not know is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0
        receive = TaggedMessages.receive

        def counted(post: TaggedMessages, tensor: torch.Tensor, peer: int, tag: int) -> None:
            self.bytes += tensor.nbytes
            receive(post, tensor, peer, tag)

        self._posts = mock.patch.object(TaggedMessages, "receive", counted)

    def __enter__(self) -> Received:
        self._posts.start()
        super().__enter__()
        return self

    def __exit__(self, *caught: Any) -> None:
        super().__exit__(*caught)
        self._posts.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().split(".")[0]
        if name in RECEIVED:
            self.bytes += RECEIVED[name](args, result)
        elif func.namespace in ("c10d", "_c10d_functional", "_dtensor") and name not in SILENT:
            raise NotImplementedError(f"nobody says how many bytes a rank receives in {name}")
        return result


@contextmanager
def dtensor_all_to_all() -> Iterator[None]:
    """Let DTensor call the all-to-all that it calls on GPUs: on CPUs it gathers instead, though gloo has one."""

    def exchange(tensor: torch.Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> Any:
        group = mesh.get_group(mesh_dim).group_name
        return torch.ops._dtensor.shard_dim_alltoall(tensor, gather_dim, shard_dim, group)

    with mock.patch.object(placement_types, "shard_dim_alltoall", exchange):
        yield
