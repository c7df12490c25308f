"""Comparisons and values that every rank gets: `equal`, `allclose`, `item`, `tolist`, `numpy`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwise import settings
from shardwise.comm.group import is_member
from shardwise.errors import PropertyError
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.compute import common_group
from shardwise.ops.engine.decomposition import call_decomposed
from shardwise.ops.engine.gathered import is_fully_replicated
from shardwise.ops.engine.table import TABLE
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import Handler, distributed_in, op_name, registry, unsupported

aten = torch.ops.aten


def _equal(call: Call) -> bool:
    one, other = call.operands
    common_group(call)
    if one.shape != other.shape:
        return False
    return bool((one == other).all().item())


def _allclose(call: Call) -> bool:
    one, other = call.operands
    common_group(call)
    close = torch.isclose(one, other, rtol=call["rtol"], atol=call["atol"], equal_nan=call["equal_nan"])
    return bool(close.all().item())


def _item(call: Call) -> Any:
    """The only element."""
    x = call.operands[0]
    assert isinstance(x, ShardedTensorBase)
    if x.numel() != 1:
        raise PropertyError(f"a Tensor with {x.numel()} elements cannot be converted to Scalar")
    layout, group = x._layout, x._frame.process_group
    with torch.no_grad():
        if group is None or len(np.unique(layout.ranks[layout.pattern.filled])) == dist.get_world_size(group):
            return next(local.item() for local in x._local_tensors() if local.numel())
        return x.full_tensor().item()  # type: ignore[attr-defined] # it has a group


def _of_whole(op: Any) -> Handler:
    """A handler that calls a method of the whole tensor on every rank, if it is within the gather budget."""

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        tensor, *rest = args
        budget = settings.current().gather_budget
        if tensor.nbytes > budget and tensor.numel() > 1 and not is_fully_replicated(tensor):
            raise unsupported(
                op,
                args,
                kwargs,
                f"{op_name(op)} needs all elements on every rank, {tensor.nbytes:,} bytes, more than the gather budget "
                f"of {budget:,}",
                f"Call full_tensor() first, or allow it with shardwise.gather_budget({tensor.nbytes})",
            )
        if tensor.requires_grad and op is torch.Tensor.tolist:
            tensor = tensor.detach()
        return op(tensor.full_tensor(), *rest, **kwargs)

    return handler


def _check_errors(call: Call) -> None:
    """Raise on every rank an error of linear algebra on any rank."""
    info = call["info"]
    if (info != 0).any().item():
        call.run([info.full_tensor()])


def _comparing(op: Any) -> Any:
    """A handler of comparisons; under `outsiders_compare`, ranks outside of the group may call it, too."""

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        if settings.current().outsiders_compare:
            members = [is_member(one._process_group) for one in distributed_in(args, kwargs) if one._process_group]
            if not all(members):
                return not any(members)  # a rank without shards finds no difference
        return call_decomposed(op, args, kwargs)

    return handler


for _op in (torch.equal, torch.Tensor.equal, torch.allclose, torch.Tensor.allclose):
    registry.built_in[_op] = _comparing(_op)
TABLE[aten._linalg_check_errors] = _check_errors
TABLE.update({aten.equal: _equal, aten.allclose: _allclose, aten._local_scalar_dense: _item, aten.item: _item})
for _method in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__):
    registry.built_in[_method] = _of_whole(_method)
