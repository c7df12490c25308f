"""`ShardedTensor`: the class, the factories, and the verbs that move data.

- The class, from the base up: `torch_function` (calls of torch's functions; handlers in `dispatch`), `wrapper` (frame
  and local tensors; `frame`, `shard`), `base` (attributes; `strides`, `checkpointable`), `tensor` (verbs)
- New tensors: `creation`, `sharding` (`shard`, `replicate`; short forms in `shorthand`), `from_local`, `batches`
  (`join`; `batch_forms`); all checks in `assembly`, metadata of all ranks in `metadata_merge`
- Verbs: `movement` (scatter, gather, redistribute, reshard), `devices` (`to`), `transforms` (within `torch.func`)
- Storing: `pickling`, `saved_files` (one writer for each file), `state_dict` (hooks), `remote` (RPC references)
- `partial`: values that every rank has; `redistribution_cache`; `random`: random numbers by position
"""

from shardwise.tensor.base import ShardedTensorBase
from shardwise.tensor.batches import join
from shardwise.tensor.creation import empty, full, init_from_local_shards, ones, rand, randn, zeros
from shardwise.tensor.from_local import from_local
from shardwise.tensor.shard import Shard
from shardwise.tensor.state_dict import pre_load_state_dict_hook, state_dict_hook
from shardwise.tensor.tensor import ShardedTensor, shard_tensor

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
