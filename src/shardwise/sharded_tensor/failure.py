"""Errors that leave an op on a sharded tensor: the other ranks are let know by the outermost call."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

from torch.distributed import ProcessGroup
from torch.utils.checkpoint import _StopRecomputationError

from shardwise.process_group import raises_alone

ENTRANCES: set[CodeType] = set()  # the functions through which ops are called


def leaves(error: Exception, process_group: ProcessGroup | None) -> None:
    """An error leaves the function that calls this: an entrance. Within another one, somebody may still catch it.

    With an error of its own, torch's checkpoint ends a computation that it does again, where it has seen enough.
    """
    if isinstance(error, _StopRecomputationError):
        return
    frame: FrameType | None = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_code in ENTRANCES:
            return
        frame = frame.f_back
    raises_alone(process_group, error)
