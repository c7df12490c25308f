"""A world of ranks that are not there: this process is one of them, whichever it wants to be."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch.distributed import distributed_c10d

from shardwise.torch_private import register_process_group, resolve_process_group

_first_names = count(1 << 20, 1 << 10)


class _Registry:
    """What torch keeps of the process groups of one world. Torch's own tests give each of their threads such a one."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.group_count = next(_first_names)  # of which groups have their names, which differ within a process
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, Any] = {}
        self.pg_group_ranks: dict[Any, Any] = {}
        self.pg_backend_config: dict[Any, Any] = {}
        self.tags_to_pg: dict[Any, Any] = {}
        self.pg_to_tag: dict[Any, Any] = {}
        self.pg_coalesce_state: dict[Any, Any] = {}
        self.comms: list[Any] = []


@contextmanager
def fake_world(rank: int, ranks: int) -> Iterator[None]:
    """Within this context, this process is a rank of a world in which nothing is sent, and of no other."""
    before: Any = distributed_c10d._world
    show = sys.excepthook  # torch writes the rank before each line
    distributed_c10d._world = _Registry()  # type: ignore[assignment] # it has the same attributes
    try:
        distributed_c10d.init_process_group("fake", rank=rank, world_size=ranks)
        try:
            yield
        finally:
            distributed_c10d.destroy_process_group()
    finally:
        distributed_c10d._world, sys.excepthook = before, show
        _register_names(before)


def _register_names(world: Any) -> None:
    """Destroying a world makes torch forget the names of all groups in the process: say those of this world again."""
    for group, name in world.pg_names.items():
        try:
            resolve_process_group(name)
        except RuntimeError:
            register_process_group(name, group)
