"""Where a shard lives: ``"rank:1/cuda:0"``, ``"worker0/cpu"`` or ``"cpu"``, parsed once.

For callers, a placement is torch's own `_remote_device`, as in the old system. Inside the library it is the frozen
`Placement`, which callers cannot change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.errors import PlacementError
from shardwise.layout.geometry import IntArray, read_only
from shardwise.torch_private import RemoteDevice as RemoteDevice
from shardwise.torch_private import unset_fake_mode

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PlacementLike = str | torch.device | RemoteDevice
_new = object.__new__
WITHOUT_INDEX = ("cpu", "meta")  # kinds of devices of which there is one: cpu:0 is cpu


@dataclass(frozen=True)
class Placement:
    """A device on a rank. An RPC worker's rank is None until it is known; a bare device has neither."""

    device: torch.device
    rank: int | None = None
    worker: str | None = None

    def __post_init__(self) -> None:
        if self.device.index is not None and self.device.type in WITHOUT_INDEX:
            object.__setattr__(self, "device", torch.device(self.device.type))

    @staticmethod
    def of(placement: PlacementLike | Placement | None) -> Placement:
        """The frozen form of anything that names a place."""
        if isinstance(placement, Placement):
            return placement
        if placement is None:
            raise PlacementError("remote device is None: each shard needs a placement such as 'rank:0/cpu'")
        remote = parse_placement(placement)
        if (remote.rank() or 0) >= 2**31:
            raise PlacementError(f"no job has a rank {remote.rank()}")
        return Placement(remote.device(), remote.rank(), remote.worker_name())

    def __str__(self) -> str:
        if self.worker is not None:
            return f"{self.worker}/{self.device}"
        return str(self.device) if self.rank is None else f"rank:{self.rank}/{self.device}"

    def remote_device(self) -> RemoteDevice:
        """A new `_remote_device` of the same place."""
        return _remote(_fields(str(self)))

    def on(self, device: torch.device) -> Placement:
        """The same rank, another device."""
        return replace(self, device=device)


@lru_cache(maxsize=1 << 15)  # few texts occur many times
def _fields(text: str) -> dict[str, Any]:
    """The fields of a `_remote_device` of this text."""
    return vars(RemoteDevice(text))


def _remote(fields: dict[str, Any]) -> RemoteDevice:
    """A new `_remote_device`. Never a shared one: callers write into the placements of their records."""
    remote = _new(RemoteDevice)
    remote.__dict__ = fields.copy()
    return remote


def parse_placement(placement: PlacementLike) -> RemoteDevice:
    """A `_remote_device`; the given one is returned as it is."""
    if isinstance(placement, RemoteDevice):
        return placement
    try:
        return _remote(_fields(placement)) if isinstance(placement, str) else RemoteDevice(placement)
    except (ValueError, TypeError, RuntimeError) as error:
        raise PlacementError(str(error)) from error


def parse_placements(placements: Sequence[PlacementLike]) -> list[RemoteDevice]:
    """A new list of `_remote_device`; the caller's list stays as it is."""
    if isinstance(placements, str) or not isinstance(placements, Sequence):
        raise PlacementError(f"placements should be a sequence such as ['rank:0/cpu'], found {placements!r}")
    return [parse_placement(placement) for placement in placements]


def same_device(one: torch.device, other: torch.device) -> bool:
    """Whether two names stand for one device of this process: cpu:0 is cpu, and cuda is the current cuda device."""
    return one == other or (one.type == other.type and _index(one) == _index(other))


def _index(device: torch.device) -> int | None:
    if device.type in WITHOUT_INDEX:
        return None
    module = torch.get_device_module(device.type)
    without = device == torch.device(device.type)  # an index is declared to be there always
    return int(module.current_device()) if without and module.is_available() else device.index


def rank_device(rank: int, device_type: str) -> torch.device:
    """The device of this type that a rank uses by convention: GPUs are dealt out to ranks in turn."""
    if device_type in WITHOUT_INDEX:
        return torch.device(device_type)
    count = torch.get_device_module(device_type).device_count()
    return torch.device(device_type, rank % count if count else rank)


def usual_place(rank: int, device_type: str) -> RemoteDevice:
    """The placement of a rank on the device of this type that it uses by convention."""
    return Placement(rank_device(rank, device_type), rank).remote_device()


def all_ranks(process_group: ProcessGroup | None = None, device_type: str | None = None) -> list[RemoteDevice]:
    """A placement on every rank of a group, in its order: by default of the default group, on `device_moved_by` it."""
    group = dist.group.WORLD if process_group is None else process_group
    if group is None:
        raise PlacementError(
            "no placements are given, and there is no process group whose ranks they could be: call "
            "dist.init_process_group first, or name them, as in ['rank:0/cpu', 'rank:1/cpu']"
        )
    kind = device_moved_by(group) if device_type is None else device_type
    return [usual_place(rank, kind) for rank in dist.get_process_group_ranks(group)]


def device_moved_by(process_group: ProcessGroup) -> str:
    """The type of device whose memory a group moves: the accelerator, if one of its backends does, else the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    moved = {device.type for device in process_group._device_types}
    return accelerator.type if accelerator is not None and accelerator.type in moved else "cpu"


def device_for(there: str, process_group: ProcessGroup) -> str:
    """The type of device for the shards of a tensor that is on this one: the same, if the group moves its memory."""
    moved = {device.type for device in process_group._device_types}  # none: a group written in Python moves all
    return there if there in moved or (not moved and there != "meta") else device_moved_by(process_group)


def mesh_placements(mesh: DeviceMesh, axis: int | str) -> list[RemoteDevice]:
    """The placements along one axis of a mesh, through the calling rank's own place in it."""
    names = mesh.mesh_dim_names or ()
    if isinstance(axis, str) and axis not in names:
        raise PlacementError(f"axis {axis!r} does not exist in a mesh with axes {list(names)}")
    index = names.index(axis) if isinstance(axis, str) else axis
    if not -mesh.ndim <= index < mesh.ndim:
        raise PlacementError(f"axis {axis!r} does not exist in a mesh of {mesh.ndim} axes")
    line = np.moveaxis(mesh_ranks(mesh), index, -1)
    if mesh.ndim > 1:
        here = mesh.get_coordinate()
        if here is None:
            raise PlacementError(f"this rank is not in the mesh, so no line along axis {axis!r} passes through it")
        others = [place for k, place in enumerate(here) if k != index % mesh.ndim]
        line = line[tuple(others)]
    return [usual_place(rank, mesh.device_type) for rank in line.tolist()]


def mesh_grid(mesh: DeviceMesh) -> tuple[list[RemoteDevice], tuple[int, ...]]:
    """All placements of a mesh in row-major order, and the shape of the mesh."""
    ranks = mesh_ranks(mesh)
    return [usual_place(rank, mesh.device_type) for rank in ranks.reshape(-1).tolist()], ranks.shape


_ranks: WeakKeyDictionary[DeviceMesh, IntArray] = WeakKeyDictionary()


def rank_in_mesh(mesh: DeviceMesh) -> int:
    """The rank of this process in the world of the mesh; -1 outside of the mesh."""
    here = mesh.get_coordinate()
    return -1 if here is None else int(mesh_ranks(mesh)[tuple(here)])


def mesh_ranks(mesh: DeviceMesh) -> IntArray:
    """The ranks of a mesh in its shape, read-only; also within FakeTensorMode, where torch would not read them."""
    ranks = _ranks.get(mesh)
    if ranks is None:
        with unset_fake_mode():
            ranks = _ranks[mesh] = read_only(mesh.mesh.to("cpu", torch.int64).numpy())
    return ranks
