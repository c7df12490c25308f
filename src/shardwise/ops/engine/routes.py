"""`Route`: rows of this rank on their way to the ranks that values name, and the answers on their way back.

Both are permutations of the rows of all ranks, so the backward of each is the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup

from shardwise.autograd.anchors import anchor_gradient, input_anchor, output_anchor
from shardwise.autograd.recorded_backward import register_anchor, sendable
from shardwise.comm.transfer.by_value import RowExchange
from shardwise.comm.transfer.wire import wire_device
from shardwise.layout.geometry import IntArray
from shardwise.ops.engine.recorder import depends_on_values
from shardwise.tensor import ShardedTensorBase


class SentRows(torch.autograd.Function):
    """Rows that went to other ranks, or answers that came back. The backward is a collective, on every rank."""

    @staticmethod
    def forward(ctx: Any, exchange: RowExchange, back: bool, anchor: torch.Tensor | None, rows: torch.Tensor) -> Any:
        """An anchor, then the rows."""
        ctx.exchange, ctx.back = exchange, back
        return output_anchor(ctx, anchor, [rows]), exchange.send(rows, back=back)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The gradients on their way back."""
        anchor, rows = _sent(ctx.exchange, not ctx.back, *sendable(grads, ctx))
        register_anchor(anchor)
        return None, None, anchor_gradient(ctx, 2, anchor), rows


_sent: Callable[..., tuple[torch.Tensor, ...]] = SentRows.apply  # which torch declares without types


class Route:
    """Where the rows of this rank go. Every rank of the model's group makes one, and calls its methods.

    ``counts`` are the rows for each member of the group, which lie in this order.
    """

    def __init__(self, model: ShardedTensorBase, counts: IntArray, verb: str) -> None:
        depends_on_values()
        group: ProcessGroup | None = model._frame.process_group
        assert group is not None
        self._exchange = RowExchange(group, counts, wire_device(model._layout.places.device_types, group), verb)

    def send(self, rows: torch.Tensor, *, records: bool = False) -> torch.Tensor:
        """The rows from all members, in their order; ``records`` says whether any rank wants their gradient."""
        return self._moved(rows, back=False, records=records)

    def answer(self, rows: torch.Tensor, *, records: bool = False) -> torch.Tensor:
        """For each row that this rank has sent, what the member that got it answers."""
        return self._moved(rows, back=True, records=records)

    def _moved(self, rows: torch.Tensor, *, back: bool, records: bool) -> torch.Tensor:
        if not records:
            with torch.no_grad():
                return self._exchange.send(rows, back=back)
        return _sent(self._exchange, back, input_anchor(None, [rows], rows.device), rows)[1]
