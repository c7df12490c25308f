"""`ShardedTensor`: one tensor whose boxes lie on the ranks of a process group."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup, rpc

from shardwise.errors import RpcError
from shardwise.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties, restore_properties
from shardwise.process_group import or_default
from shardwise.sharded_tensor import assembly, pickling, remote
from shardwise.sharded_tensor.base import ShardedTensorBase
from shardwise.sharded_tensor.shard import Shard
from shardwise.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, GridShardingSpec, ShardingSpec


class ShardedTensor(ShardedTensorBase):
    """A tensor whose boxes lie on the ranks of a process group. Every rank makes it with the same arguments.

    Made uninitialised by its constructor, which is `shardwise.empty`; see there for the arguments.
    """

    def __new__(
        cls,
        sharding_spec: ShardingSpec,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        process_group: ProcessGroup | None = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """Allocate this rank's shards. Every rank of the group calls it; only a digest travels."""
        properties = TensorProperties(
            torch.get_default_dtype() if dtype is None else dtype,
            layout,
            requires_grad,
            memory_format,
            pin_memory,
        )
        self = cls._wrap(assembly.allocate(sharding_spec, size, properties, process_group))
        return remote.share(self) if init_rrefs else self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything is done in `__new__`."""

    @classmethod
    def _init_from_local_shards(
        cls,
        local_shards: list[Shard],
        *global_size: Any,
        process_group: ProcessGroup | None = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """A tensor from every rank's shards. Every rank of the group calls it; the shards' metadata travels.

        A ``None`` in the global size means: work it out, by laying the shards behind each other in that dim in the
        order of the ranks (unless their offsets already fit).
        """
        self = cls._wrap(assembly.from_local_shards(local_shards, global_size, process_group))
        return remote.share(self) if init_rrefs else self

    @classmethod
    def _init_from_local_tensor(
        cls,
        local_tensor: torch.Tensor,
        sharding_spec: ShardingSpec,
        *global_size: Any,
        process_group: ProcessGroup | None = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """A tensor from one local tensor per rank and the spec they follow. Every rank calls it; a digest travels."""
        self = cls._wrap(assembly.from_local_tensor(local_tensor, sharding_spec, global_size, process_group))
        return remote.share(self) if init_rrefs else self

    @classmethod
    def _init_from_local_shards_and_global_metadata(  # type: ignore[override] # the old system's two signatures
        cls,
        local_shards: list[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        process_group: ProcessGroup | None = None,
        init_rrefs: bool = False,
        sharding_spec: ShardingSpec | None = None,
    ) -> ShardedTensor:
        """A tensor from this rank's shards and metadata that every rank knows. No communication."""
        group = or_default(process_group)
        self = cls._wrap(assembly.from_global_metadata(local_shards, sharded_tensor_metadata, sharding_spec, group))
        return remote.share(self) if init_rrefs else self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild_sharded_tensor, (pickling.state_of(self),)

    def remote_shards(self) -> dict[int, list[rpc.RRef[Shard]]]:
        """For each other RPC rank that holds shards, references to them."""
        if not self._init_rrefs:
            raise RpcError("ShardedTensor created with init_rrefs=False, no RRefs to remote shards available")
        return self._remote_shards or {}


def rebuild_sharded_tensor(state: dict[str, Any]) -> ShardedTensor:
    """What a pickle calls when it is loaded."""
    self = ShardedTensor._wrap(pickling.restore(state))
    if state["is_param"]:
        self._is_param = True  # torch.nn.Parameter's own mark
    return remote.share(self) if state["init_rrefs"] else self


# With these, `torch.load(..., weights_only=True)` accepts sharded tensors; each checks what it is called with.
torch.serialization.add_safe_globals(
    [
        rebuild_sharded_tensor,
        restore_properties,
        ShardMetadata,
        ChunkShardingSpec,
        EnumerableShardingSpec,
        GridShardingSpec,
    ]
)
