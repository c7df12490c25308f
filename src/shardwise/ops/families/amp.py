"""The op of `torch.amp.GradScaler`: unscale gradients, and check whether any rank has an inf or a NaN."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.agreement import begin_sending, in_step_sharing
from shardwise.comm.group import CallFingerprint, Fields, is_member, is_tagged
from shardwise.comm.peers import watch
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import registry
from shardwise.torch_private import amp_unscale


def _unscale(types: Any, args: Any, kwargs: Any, process_group: Any) -> None:
    """Multiply every gradient by the inverse scale, and set `found_inf` on all ranks if any rank would set it.

    So all ranks or none skip the step, and all change their scale alike. Every rank of the gradients' groups calls it;
    one bit of each rank travels.
    """
    grads, found_inf, inv_scale = args
    sharded = [grad for grad in grads if isinstance(grad, ShardedTensorBase)]
    local: list[torch.Tensor] = []
    for grad in grads:
        local += grad._local_tensors() if isinstance(grad, ShardedTensorBase) else [grad]
    values = [one._values() if one.is_sparse else one for one in local]
    if values:
        amp_unscale(values, found_inf, inv_scale)

    fields = {"verb": "unscale"}

    def work() -> tuple[None, Fields, bool]:
        return None, fields, bool(found_inf.item())

    groups = {id(grad._process_group): grad._process_group for grad in sharded if grad._process_group is not None}
    mine = [group for group in groups.values() if is_member(group)]
    for group in sorted(mine, key=lambda group: group.size()):  # a flag of a small group reaches the large one
        if found_inf.is_cuda and not is_tagged(group):  # then the host need not know
            begin_sending(group, CallFingerprint(fields))
            flagged = dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group, async_op=True)
            watch(flagged, group)
            flagged.wait()
        elif any(in_step_sharing(group, work)[1]):
            found_inf.fill_(1.0)


registry.built_in[amp_unscale] = _unscale
