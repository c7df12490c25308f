"""Transfers while a compiler traces: instead of being sent, a transfer becomes an op of the graph.

`transfer_ops` holds what adds such ops to the graph that is being traced, if any. `move` and `sum_replicas` ask here
before anything is sent, so the code above them need not know that it is traced. Torch's own tracers know nothing of
transfers: what calls here under one of them raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup

from shardwise import settings
from shardwise.comm.group import is_fake, is_member
from shardwise.comm.peers import notify_of_failure
from shardwise.comm.transfer.plan import TransferPlan
from shardwise.errors import UnsupportedOpError
from shardwise.layout import Layout
from shardwise.settings import ContextValue
from shardwise.torch_private import (
    PRE_DISPATCH,
    PROXY_MODE,
    dispatch_mode,
    dispatch_mode_count,
    is_jit_tracing,
    is_key_included,
    pre_dispatch_mode,
)


class TransferOps(Protocol):
    """What a tracer adds to its graph for each transfer."""

    anchor: torch.Tensor | None  # a tensor of the graph that every anchor leads to

    def move(
        self,
        plan: TransferPlan,
        tensors: Sequence[torch.Tensor],
        group: ProcessGroup,
        *,
        dtype: torch.dtype,
        max_bytes: int | None,
        fill: Any,
    ) -> list[torch.Tensor]:
        """The local tensors of the plan's destination."""

    def sum_replicas(
        self, layout: Layout, tensors: Sequence[torch.Tensor], group: ProcessGroup, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """For each local tensor of a layout the sum over all replicas of its box."""

    def draw(self, step: Any) -> list[torch.Tensor]:
        """The results of a step that draws random numbers."""


transfer_ops: ContextValue[TransferOps | None] = ContextValue("shardwise.transfer_ops", None)


def is_traced() -> bool:
    """Whether a compiler traces what this thread does."""
    return transfer_ops.get() is not None


TRACED = (
    "torch's tracers (make_fx, torch.export, torch.jit.trace) see no layouts: a graph of theirs would lack what goes "
    "between the ranks. Take shardwise.compilation.local_graph(function, *args): its module is this rank's graph, "
    "transfers included, and torch.export.export takes it"
)


def has_watchers() -> bool:
    """Whether dispatch modes or tracers of torch may record what this thread does. It is asked for every op."""
    return bool(dispatch_mode_count() or is_jit_tracing() or is_key_included(PRE_DISPATCH))


def refuse_tracers(group: ProcessGroup | None) -> None:
    """Raise while a tracer of torch records what this thread does, and none of ours.

    The other ranks of the group get a notice, also from a rank that traces without data: it may be the only one that
    traces.
    """
    if is_jit_tracing() or (_makes_proxies() and not is_traced()):
        error = UnsupportedOpError(TRACED)
        if settings.current().validate and group is not None and _has_others(group):
            notify_of_failure(group, error)
        raise error


def _makes_proxies() -> bool:
    """Whether a tracer of torch is active; torch.export has its own above autograd."""
    return dispatch_mode(PROXY_MODE) is not None or pre_dispatch_mode(PROXY_MODE) is not None


def _has_others(group: ProcessGroup) -> bool:
    return is_member(group) and group.size() > 1 and not is_fake(group)


VALUES_DECIDE = "which data goes to which rank depends on values, and a graph is made without values"


def refuse_in_graph(what: str, why: str = VALUES_DECIDE) -> None:
    """Raise if a compiler traces: by default since what this call sends depends on values."""
    if is_traced():
        raise UnsupportedOpError(f"{what} cannot be a part of one graph: {why}")
