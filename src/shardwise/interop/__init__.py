"""Other systems' tensors, checkpoints and trainers.

- `dtensor`: the conversions to and from DTensor; `conversion` does them, `placements` has DTensor's layouts.
- `dcp`, `dcp_optimizers`: `torch.distributed.checkpoint` with sharded tensors and `ShardedOptimizer`.
- `patching`: replaces functions when their module is imported. `torch_patches`: the patches of torch.
- `one_graph`: `torch.compile(fullgraph=True)` of sharded tensors goes to `shardwise.compilation`.
- `operators`: a graph of `torch.compile` ends at an operator on a sharded tensor.
- `lightning`: a strategy for its Trainer. `huggingface`: folders of safetensors, transformers, accelerate and peft.
"""

from shardwise.interop import dcp_optimizers, lightning, one_graph, operators, torch_patches
from shardwise.interop.dtensor import from_dtensor, to_dtensor

__all__ = ["dcp_optimizers", "from_dtensor", "lightning", "one_graph", "operators", "to_dtensor", "torch_patches"]
