"""The backend of a process group: which memory it sends, and how messages are told apart."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup, distributed_c10d

from shardwise.comm.group.state import cached_per_group, group_state

MOST_EACH = 32  # ranks of a group in which all write to each
CPU = torch.device("cpu")
_cuda: Any = torch.cuda  # of which torch declares some functions without types


def collective_device(process_group: ProcessGroup) -> torch.device:
    """Where a tensor must lie for this group's backend to move it."""
    for device in process_group._device_types:
        if device.type == "cpu":
            return device
    if not process_group._device_types:  # a group written in Python, such as torch's threaded one, moves all by itself
        return CPU
    device = process_group._device_types[0]
    return torch.device(device.type, torch.get_device_module(device.type).current_device())


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured: kernels are recorded, and do not run yet."""
    return _cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())


def is_large(process_group: ProcessGroup) -> bool:
    """Whether the group has so many ranks that they do not write to each other one by one. All ranks say the same."""
    return process_group.size() > MOST_EACH


def is_tagged(process_group: ProcessGroup) -> bool:
    """Whether memory of the CPU is sent by gloo, whose messages between two ranks are told apart by a tag."""
    return gloo_of(process_group) is not None


@cached_per_group()
def gloo_of(process_group: ProcessGroup) -> Any:
    """The backend that sends memory of the CPU, if it is gloo; else None."""
    is_gloo = type(process_group) is ProcessGroup and cpu_backend(process_group) == "gloo"
    return process_group._get_backend(CPU) if is_gloo else None


def cpu_backend(process_group: ProcessGroup) -> str:
    """The name of the backend that sends memory of the CPU; empty where there is none."""
    with suppress(RuntimeError, ValueError):  # a group without a backend for the CPU, or without one at all
        return str(process_group._get_backend(CPU).name())
    return ""


def timeout_of(process_group: ProcessGroup) -> timedelta:
    """How long a rank of this group may wait for the others."""
    with suppress(RuntimeError, ValueError, AttributeError):  # a torch whose backends do not say it
        found: Any = process_group._get_backend(CPU)
        return timedelta(seconds=found.options._timeout.total_seconds())
    return distributed_c10d.default_pg_timeout


def store_of(process_group: ProcessGroup) -> Any:
    """The store in which ranks of a group write for each other; None where it has none."""
    return group_state(process_group).store
