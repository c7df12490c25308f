"""Code written as TorchRec is: its constructors, and what it reads and changes, on the drop-in."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise import dropin
from shardwise.testing import ranks

WORLD, ROWS, COLUMNS = 3, 10, 6


@ranks(WORLD, bare=True)
def test_row_wise_tables() -> None:
    """A plan as an enumerable spec; tensors from it without communication; state dicts, copies, dict keys."""
    dropin.install()
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, TensorProperties
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata

    rank = dist.get_rank()
    rows = [4, 4, 2]
    offsets = [0, 4, 8]
    plan = EnumerableShardingSpec(
        [
            ShardMetadata(shard_sizes=[rows[to], COLUMNS], shard_offsets=[offsets[to], 0], placement=f"rank:{to}/cpu")
            for to in range(WORLD)
        ]
    )
    properties = TensorProperties(dtype=torch.float32, requires_grad=False)
    metadata = plan.build_metadata(tensor_sizes=torch.Size([ROWS, COLUMNS]), tensor_properties=properties)
    local = copy.deepcopy(metadata.shards_metadata[rank])
    local.placement = torch.distributed._remote_device(f"rank:{rank}/cpu")
    table = torch.full(local.shard_sizes, float(rank))
    shard = Shard(tensor=table, metadata=local)
    tensor = ShardedTensor._init_from_local_shards_and_global_metadata(
        local_shards=[shard], sharded_tensor_metadata=metadata, process_group=dist.group.WORLD
    )
    by_communication = ShardedTensor._init_from_local_shards(
        [Shard(table, copy.deepcopy(local))], torch.Size([ROWS, COLUMNS]), process_group=dist.group.WORLD
    )
    for made in (tensor, by_communication):
        assert made.size() == (ROWS, COLUMNS)
        assert made.metadata().shards_metadata[rank].shard_sizes == local.shard_sizes
        assert made.metadata().shards_metadata[rank].shard_offsets[0] == offsets[rank]
        assert [one.placement.rank() for one in made.metadata().shards_metadata] == list(range(WORLD))
        assert made.local_shards()[0].tensor is table
        assert made._process_group is dist.group.WORLD
        assert made._init_rrefs is False

    # An optimizer keyed by parameter, and a state that is copied shard by shard, or whose tensors are replaced.
    states: dict[Any, dict[str, Any]] = {tensor: {"momentum": tensor.clone()}}
    assert states[tensor]["momentum"].local_shards()[0].tensor is not table
    for target, source in zip(tensor.local_shards(), states[tensor]["momentum"].local_shards(), strict=True):
        target.tensor.detach().copy_(source.tensor + 1)
    assert torch.equal(table, torch.full_like(table, rank + 1.0))
    replacement = torch.zeros_like(table)
    tensor.local_shards()[0].tensor = replacement
    assert tensor.local_tensor() is replacement
    assert copy.deepcopy(tensor.metadata()).size == tensor.size()

    # The state dict of a module that holds the tensor as its parameter.
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(by_communication, requires_grad=False))
    assert isinstance(module.state_dict()["weight"], ShardedTensor)
    out = torch.empty(ROWS, COLUMNS) if rank == 0 else None
    module.state_dict()["weight"].gather(0, out)
    if out is not None:
        assert torch.equal(out[:, 0], torch.tensor([1.0] * 4 + [2.0] * 4 + [3.0] * 2))


@ranks(WORLD, bare=True)
def test_table_wise_and_column_wise_tables() -> None:
    """A table on one rank, of which the others have no shard; and one with several columns on a rank."""
    dropin.install()
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

    rank = dist.get_rank()
    owners = {"table-wise": [(0, COLUMNS, 1)], "column-wise": [(0, 2, 2), (2, 2, 0), (4, 2, 2)]}
    for columns in owners.values():
        metadata = ShardedTensorMetadata(
            shards_metadata=[], size=torch.Size([ROWS, COLUMNS]), tensor_properties=TensorProperties()
        )
        for begin, width, owner in columns:
            metadata.shards_metadata.append(ShardMetadata([0, begin], [ROWS, width], f"rank:{owner}/cpu"))
        shards = [
            Shard(torch.full([ROWS, width], float(begin)), ShardMetadata([0, begin], [ROWS, width], f"rank:{rank}/cpu"))
            for begin, width, owner in columns
            if owner == rank
        ]
        tensor = ShardedTensor._init_from_local_shards_and_global_metadata(
            local_shards=shards, sharded_tensor_metadata=metadata, process_group=dist.group.WORLD
        )
        assert len(tensor.local_shards()) == len(shards)
        joined = ShardedTensor._init_from_local_shards(shards, [ROWS, COLUMNS], process_group=dist.group.WORLD)
        wanted = torch.cat([torch.full([ROWS, width], float(begin)) for begin, width, _ in columns], 1)
        assert torch.equal(tensor.full_tensor(), wanted)
        assert torch.equal(joined.full_tensor(), wanted)


@ranks(WORLD, bare=True)
def test_inference_tables_without_a_group() -> None:
    """Shards of each process alone, on several devices, in a ShardedTensorBase; copied from one to the other."""
    dropin.install()
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensorBase, ShardedTensorMetadata, ShardMetadata

    def made(value: float) -> ShardedTensorBase:
        shards = [
            Shard(torch.full([5, COLUMNS], value + k), ShardMetadata([5 * k, 0], [5, COLUMNS], "cpu")) for k in range(2)
        ]
        metadata = ShardedTensorMetadata(
            shards_metadata=[shard.metadata for shard in shards], size=torch.Size([ROWS, COLUMNS])
        )
        return ShardedTensorBase._init_from_local_shards_and_global_metadata(
            local_shards=shards, sharded_tensor_metadata=metadata
        )

    target, source = made(0.0), made(7.0)
    for one in target.local_shards():
        for other in source.local_shards():
            if one.metadata.shard_offsets == other.metadata.shard_offsets:
                one.tensor.detach().copy_(other.tensor)
    assert [shard.tensor[0, 0].item() for shard in target.local_shards()] == [7.0, 8.0]
