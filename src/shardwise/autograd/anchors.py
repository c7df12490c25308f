"""Anchors: scalar zeros that stand in the autograd graph of a rank for tensors that the rank does not have.

The graph lies on the local shards, and the backward of a transfer is a collective, which must run on every rank. A rank
without shards would have no graph, and would miss the collective. So each Function that communicates takes an anchor
before its tensors, unless one of these leads to the graph, and gives an anchor before its results. A tensor without
shards on this rank keeps an anchor in their place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from shardwise.comm.group import is_capturing, without_data
from shardwise.comm.transfer.in_graph import transfer_ops

if TYPE_CHECKING:
    from shardwise.tensor.wrapper import Wrapper


def new_anchor(device: torch.device) -> torch.Tensor:
    """An anchor that wants a gradient, for tensors of this device.

    The anchor lies on the same device: autograd goes through the nodes of one device in order, which the collectives
    rely on. While a compiler traces, it is one that leads to an input of the graph: the backward of the graph has no
    other leaves.
    """
    ops = transfer_ops.get()
    if ops is not None and ops.anchor is not None:
        return ops.anchor
    if device.type not in ("cpu", "meta"):
        device = torch.device(device.type, torch.get_device_module(device.type).current_device())
    return _zero(torch.device("cpu") if device.type == "meta" else device).requires_grad_()


def input_anchor(
    anchor: torch.Tensor | None, tensors: Sequence[torch.Tensor], device: torch.device
) -> torch.Tensor | None:
    """The anchor for a Function with these tensors; None where a tensor leads to the graph and there is no anchor."""
    if anchor is None and not any(tensor.requires_grad for tensor in tensors):
        return new_anchor(device)
    return anchor


def output_anchor(ctx: Any, anchor: torch.Tensor | None, tensors: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """The anchor that a Function of this anchor and these tensors gives, saved for its backward."""
    made = _zero((tensors[0] if anchor is None else anchor).device)
    ctx.save_for_backward(made)
    return made


def _zero(device: torch.device) -> torch.Tensor:
    """A new scalar zero, which nobody writes to; on an accelerator all share their memory, and no kernel runs."""
    if device.type == "cpu" or without_data() or is_capturing():
        return torch.zeros((), device=device)
    return _shared_zero(device).detach()


@lru_cache(maxsize=64)
@torch.inference_mode(mode=False)
def _shared_zero(device: torch.device) -> torch.Tensor:
    return torch.zeros((), device=device)


def anchor_gradient(ctx: Any, position: int, grad: torch.Tensor) -> torch.Tensor | None:
    """What a backward returns for the anchor at this position of its inputs: nothing where None was given."""
    return grad if ctx.needs_input_grad[position] else None


def tie(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """One anchor for several tensors: its backward reaches all of them, and brings them nothing but zeros."""
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    total = torch.zeros((), device=wanted[0].device if wanted else None)
    for tensor in wanted:
        nothing = tensor.reshape(-1)[:0]
        total = total + (nothing.real if nothing.is_complex() else nothing).sum().to(total.device, total.dtype)
    return total


def wants_graph(tensor: Wrapper) -> bool:
    """Whether what is computed from this tensor must be recorded. The same on every rank, whatever it holds."""
    return torch.is_grad_enabled() and tensor.requires_grad


def note_write(tensor: Wrapper, anchor: torch.Tensor) -> None:
    """Let a tensor into which recorded values were written, and all that it is a view of, be recorded on every rank.

    The shards that were written to are. All others are made to depend on the anchor, which leads to the backward of the
    write; a tensor without shards here takes the anchor on. Else a rank that holds nothing of a view, or uses only what
    was not written, would not run that backward, and ranks would not agree on which parts of the tensor want a
    gradient. Every rank calls it.
    """
    one: Wrapper | None = tensor
    written = [_memory(local) for local in tensor._local_tensors()]
    while one is not None:
        tensors = one._local_tensors()
        for local in tensors:
            memory = _memory(local)
            if not local.requires_grad or not any(memory is other for other in written):
                written.append(memory)
                nothing = local[:0] if local.ndim else local.view(1)[:0]
                nothing.copy_(anchor.to(nothing.device, nothing.dtype).expand(nothing.shape))
        if not tensors:
            before = one._anchored()
            one._wants_grad, one._anchor = True, anchor if before is None else before + anchor.to(before.device)
        one = one._view_of


def _memory(local: torch.Tensor) -> torch.Tensor:
    """The tensor that autograd takes a local tensor for a view of, or the local tensor itself."""
    return local if local._base is None else local._base
