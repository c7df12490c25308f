"""What one rank gives to a transfer, whichever way the data goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from shardwise.comm.transfer.plan import TransferPlan


class TransferOperands(NamedTuple):
    """A plan, this rank's tensors of the source and of the destination layout, and the ranks that take part."""

    plan: TransferPlan
    tensors: Sequence[torch.Tensor]
    outs: list[torch.Tensor]
    group: ProcessGroup
    dtype: torch.dtype
