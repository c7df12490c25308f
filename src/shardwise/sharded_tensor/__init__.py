"""ShardedTensor: its class, its factories, and how it is put together from pieces."""

from shardwise.sharded_tensor.base import ShardedTensorBase
from shardwise.sharded_tensor.batches import join
from shardwise.sharded_tensor.creation import empty, full, init_from_local_shards, ones, rand, randn, zeros
from shardwise.sharded_tensor.from_local import from_local
from shardwise.sharded_tensor.shard import Shard
from shardwise.sharded_tensor.state_dict import pre_load_state_dict_hook, state_dict_hook
from shardwise.sharded_tensor.tensor import ShardedTensor, shard_tensor

__all__ = [
    "Shard",
    "ShardedTensor",
    "ShardedTensorBase",
    "empty",
    "from_local",
    "full",
    "init_from_local_shards",
    "join",
    "ones",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "shard_tensor",
    "state_dict_hook",
    "zeros",
]
