"""The forward of a layer of experts that lie on ranks: tokens travel to their experts and back.

It takes the place of the layer's own forward, which computes on each rank with the experts that the rank has. The ranks
of the experts are those of the layer's parameters, which may be resharded between steps.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.autograd.anchors import tie
from shardwise.comm.agreement import in_op
from shardwise.comm.group import CallFingerprint, is_capturing, is_member
from shardwise.comm.tracing import record
from shardwise.comm.transfer.wire import failing_together
from shardwise.errors import IdRangeError, ProcessGroupError, PropertyError
from shardwise.nn.experts.dispatch import Dispatch, Received
from shardwise.nn.experts.local_experts import LocalExperts, StackedExperts, make_adjacent
from shardwise.nn.experts.route import expert_route
from shardwise.nn.experts.tokens import TokenCut
from shardwise.nn.own_shards import keep_own_shards
from shardwise.torch_private import FAKE_TENSOR_ERRORS, current_backward

UNSUPPORTED = FAKE_TENSOR_ERRORS[-1]  # of what fake tensors refuse


class ExpertsForward:
    """The forward of one layer: of tokens, the experts that each has chosen, and the weights of its choices."""

    def __init__(self, local: LocalExperts) -> None:
        self.local = local
        self.chosen: torch.Tensor | None = None  # how often tokens of this rank have chosen each expert

    def __call__(self, hidden: Any, index: Any, weights: Any) -> Any:
        """For each token the weighted sum of its experts' results. Every rank of the group calls it."""
        return experts(self, hidden, index, weights)

    def count(self, index: torch.Tensor, number: int) -> None:
        """Count the choices of this rank's tokens, contiguous, of so many experts."""
        if record.is_forecast() or current_backward() != -1:  # where activations are recomputed, it is counted already
            return
        if self.chosen is None or self.chosen.device != index.device:
            self.chosen = torch.zeros(number, dtype=torch.int64, device=index.device)
        self.chosen.scatter_(0, index.view(-1), 1, reduce="add")


def experts(forward: ExpertsForward, hidden: Any, index: Any, weights: Any) -> Any:
    """The forward of a layer of experts; by this name traces and errors call it."""
    local = forward.local
    assert isinstance(local, StackedExperts)
    model = next(iter(local.parameters.values()))
    group = model._process_group
    require_experts_usable(group)
    cut = TokenCut.of(hidden, model)
    if cut.layout is not None:  # sizes of all ranks' tokens, which all ranks know
        _require_choices(hidden, index, weights)

    def work() -> tuple[torch.Tensor, CallFingerprint]:
        _require_choices(hidden, index, weights)
        chosen = cut.rows(index)[0]
        chosen = (chosen if chosen.dtype == torch.int64 else chosen.long()).contiguous()
        _require_known(chosen, model.shape[0])
        first = 1 if cut.layout is not None else -1  # a rank's own tokens may be any number of any sequences
        kinds = tuple((one.ndim, tuple(one.shape[first:]), one.dtype) for one in (hidden, index, weights))
        return chosen, _said(model._layout, cut.layout, kinds)

    chosen = in_op(group, work)
    with failing_together(group):
        forward.count(chosen, model.shape[0])
        rows, anchor = cut.rows(hidden)
        weight, other = cut.rows(weights)
        known = [one for one in (anchor, other) if one is not None]
        records = torch.is_grad_enabled() and (hidden.requires_grad or weights.requires_grad)
        route = expert_route(group, local.holders, rows.device)
        dispatch = Dispatch(route, chosen, group, lambda: cut.tokens_of_each(len(rows)))
        received = dispatch.send([rows], weight, tie(known) if known else None, records=records)
        parts, anchors = local.tensors()
        if len(received.expert):
            results = _run(local, parts, received)
            results = results if results.dtype == rows.dtype else results.to(rows.dtype)
        else:
            results = torch.zeros_like(received.rows[0])
            anchors.append(tie([one for tensors in parts.values() for one in tensors]))
        made, back = dispatch.give_back(results, received, anchors, records=records or local.wants_graph)
        return cut.wrapped(made, back, hidden)


def require_experts_usable(group: ProcessGroup) -> None:
    """Raise on a rank that has no part in the group of experts, and while a graph of kernels is captured."""
    if not is_member(group):
        raise ProcessGroupError("experts: this rank is not in the process group of the experts")
    if is_capturing():
        raise PropertyError("experts cannot be captured: the host waits for the numbers of their tokens, once a layer")


def _run(local: StackedExperts, parts: dict[str, list[torch.Tensor]], received: Received) -> torch.Tensor:
    try:
        (rows,) = received.rows
        assert received.weight is not None
        made = local.run(parts, rows, received.expert, received.weight)
        require_size_of_tokens(made, rows)
        return made
    except RuntimeError as error:
        if record.is_forecast() and not isinstance(error, FAKE_TENSOR_ERRORS):
            raise UNSUPPORTED(f"experts cannot be followed without values: {error}") from error
        raise


def require_size_of_tokens(made: torch.Tensor, rows: torch.Tensor) -> None:
    """Raise for results that are not of the size of the tokens."""
    if made.shape != rows.shape:
        raise PropertyError(
            f"experts give results of the size of their tokens; found {tuple(made.shape)} for tokens of "
            f"{tuple(rows.shape)}"
        )


def _require_known(chosen: torch.Tensor, number: int) -> None:
    """Raise for a choice of an expert that there is not; on an accelerator, torch's kernels do."""
    if chosen.device.type != "cpu" or record.is_forecast() or not chosen.numel():
        return
    for one in map(int, chosen.aminmax()):
        if not 0 <= one < number:
            raise IdRangeError(f"a token has chosen expert {one}, and there are {number}")


def _require_choices(hidden: Any, index: Any, weights: Any) -> None:
    if index.shape != weights.shape or index.shape[:-1] != hidden.shape[:-1] or hidden.ndim < 2:
        raise PropertyError(
            "experts take tokens, the numbers of the experts that each has chosen, and the weights of these choices: "
            f"found sizes {tuple(hidden.shape)}, {tuple(index.shape)} and {tuple(weights.shape)}"
        )


@lru_cache(maxsize=1024)
def _said(experts: Any, tokens: Any, kinds: Any) -> CallFingerprint:
    """What all ranks must say alike."""
    where = "of each rank's own" if tokens is None else tokens.outline
    return CallFingerprint({"verb": "experts", "experts": experts.outline, "tokens": where, "sizes": kinds})


def distribute(module: nn.Module) -> None:
    """Let a layer whose parameters are sharded into whole experts send tokens to them."""
    forward = experts_forward(module) or ExpertsForward(StackedExperts(module))
    module.forward = forward
    keep_own_shards(module)
    for parameter in forward.local.parameters.values():
        make_adjacent(parameter)


def experts_forward(module: nn.Module) -> ExpertsForward | None:
    """The forward that sends tokens to experts, of a layer that has one."""
    found = vars(module).get("forward")
    return found if isinstance(found, ExpertsForward) else None
