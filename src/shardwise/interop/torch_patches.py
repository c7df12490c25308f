"""Patches of torch, applied when its modules are imported: what would fail with sharded tensors is refused clearly.

- DDP, FSDP1 and FSDP2 refuse sharded parameters. `DTensor.from_local` and collectives of lists refuse sharded tensors;
  collectives of one tensor ask the tensor itself (`dispatch.refuse_collective`).
- Parameters that DDP and FSDP2 manage get their gradients within the backward, never bucketed at its end.
- `torch.compile` does not trace into shardwise, for operations on a sharded tensor depend on layouts and other ranks: a
  function called on a sharded tensor ends one graph and begins another; so does an operator (`operators`).
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import nn

from shardwise.autograd.buckets import never_defer
from shardwise.errors import MixedOperandsError, UnsupportedOpError
from shardwise.interop.lightning.patches import STRATEGY
from shardwise.patching import Function, replace_when_loaded, when_loaded
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import Distributed, collective_error

FSDP = "torch.distributed.fsdp"


def _refuse_from_local(theirs: Function) -> Function:
    """`DTensor.from_local`, which refuses tensors that are distributed already; torch checks only the size."""

    def forward(ctx: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(input, Distributed):
            raise MixedOperandsError(
                f"DTensor.from_local takes this rank's own plain tensor, found {input!r}: "
                "shardwise.to_dtensor(tensor, mesh, placements) makes a DTensor of it"
            )
        return theirs(ctx, input, *args, **kwargs)

    return forward


def _refuse_in_lists(theirs: Function) -> Function:
    """The check of a list of tensors, which also refuses sharded ones."""

    @functools.wraps(theirs)
    def check(param: Any, param_name: str) -> None:
        theirs(param, param_name)
        if any(isinstance(tensor, Distributed) for tensor in param):
            raise collective_error(param_name, param)

    return check


def _refuse_ddp(theirs: Function) -> Function:
    """DDP's constructor, which refuses sharded tensors that are not ignored, for it broadcasts their memory."""

    @functools.wraps(theirs)
    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        _require_plain_module(module)
        theirs(self, module, *args, **kwargs)
        for param in module.parameters():
            never_defer(param)  # DDP reduces it within the backward

    return init


def _require_plain_module(module: nn.Module) -> None:
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, ShardedTensorBase) and name not in ignored:
            raise UnsupportedOpError(
                f"DistributedDataParallel cannot manage a tensor that shardwise has sharded, '{name}': {tensor!r}. "
                "Sharded parameters need no DDP: their gradients are whole after backward. Leave them out before: "
                "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, "
                "[name for name, p in module.named_parameters() if isinstance(p, shardwise.ShardedTensor)])"
                + (f". In Lightning, {STRATEGY}" if "lightning" in sys.modules else "")
            )


def _refuse_fsdp1(theirs: Function) -> Function:
    """FSDP1's first step, which finds ignored parameters, and then refuses sharded ones that are not ignored."""

    @functools.wraps(theirs)
    def init(state: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        made = theirs(state, module, *args, **kwargs)
        for name, param in module.named_parameters():
            if isinstance(param, ShardedTensorBase) and param not in state._ignored_params:
                raise UnsupportedOpError(
                    "FullyShardedDataParallel cannot flatten a parameter that shardwise has sharded, here "
                    f"'{name}': {param!r}. Leave those out: FullyShardedDataParallel(module, "
                    "ignored_states=[p for p in module.parameters() if isinstance(p, shardwise.ShardedTensor)])"
                )
        return made

    return init


def _refuse_fsdp2(theirs: Function) -> Function:
    """FSDP2's check of a parameter, which comes before any change, and also refuses sharded ones."""

    def verify(name: str, param: nn.Parameter) -> None:
        if isinstance(param, ShardedTensorBase):
            raise UnsupportedOpError(
                f"fully_shard cannot manage a parameter that shardwise has sharded, here '{name}': {param!r}. Leave "
                "those out: fully_shard(module, "
                "ignored_params={p for p in module.parameters() if isinstance(p, shardwise.ShardedTensor)})"
            )
        theirs(name, param)

    return verify


def _note_unsharded(theirs: Function) -> Function:
    """FSDP2's unsharded parameter, whose gradient it takes within the backward."""

    def init(self: Any) -> None:
        theirs(self)
        never_defer(self._unsharded_param)

    return init


replace_when_loaded("torch.distributed.tensor._api", "_FromTorchTensor.forward", _refuse_from_local)
replace_when_loaded("torch.distributed.distributed_c10d", "_check_tensor_list", _refuse_in_lists)
replace_when_loaded("torch.nn.parallel.distributed", "DistributedDataParallel.__init__", _refuse_ddp)
replace_when_loaded(f"{FSDP}.fully_sharded_data_parallel", "_init_ignored_module_states", _refuse_fsdp1)
replace_when_loaded(f"{FSDP}._fully_shard._fsdp_init", "_verify_managed_param", _refuse_fsdp2)
replace_when_loaded(f"{FSDP}._fully_shard._fsdp_param", "FSDPParam.init_unsharded_param", _note_unsharded)
when_loaded("torch._dynamo.trace_rules", lambda rules: rules.add("shardwise"))  # torch has no public call for this
