"""`StandInsOfRank`: copies without data of what one rank has, as another rank of the same world would have it.

Layouts say what every rank holds. So one process can make the tensors of each; a fully sharded model is sharded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ProcessGroupError
from shardwise.estimation.without_data.stand_ins import CPU, StandIns
from shardwise.layout.placement import mesh_ranks
from shardwise.layout.specs import placed
from shardwise.nn.fully_sharded import FullySharded
from shardwise.nn.fully_sharded.runtime import living
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.frame import Frame, Parts
from shardwise.torch_private import FakeTensorMode

Ranks = tuple[int, ...]


def ranks_of_groups() -> dict[int, Ranks]:
    """The ranks of every group of this world, by the group's id."""
    groups: Mapping[Any, Mapping[int, int]] = distributed_c10d._world.pg_group_ranks
    return {id(group): tuple(sorted(ranks, key=ranks.__getitem__)) for group, ranks in groups.items()}


class StandInsOfRank(StandIns):
    """Makes copies as a rank of a fake world has them. ``groups`` are those of the world that the originals are of."""

    def __init__(self, mode: FakeTensorMode, groups: Mapping[int, Ranks], world: int) -> None:
        super().__init__(mode)
        self._groups, self._world = groups, world
        self._new_groups: dict[Ranks, Any] = {}
        self._storages: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._models = {
            id(one.sharded): found.model() for found in living for unit in found.units for one in unit.parameters
        }

    def of(self, value: Any) -> Any:
        """The copy of a value. A parameter of a fully sharded model is copied with the model."""
        model = self._models.get(id(value))
        if model is not None and id(model) not in self._made:
            self.of(model)
        return super().of(value)

    def _make(self, value: Any) -> Any:
        if isinstance(value, ProcessGroup):
            return self._group(value)
        if isinstance(value, DeviceMesh):
            return self._mesh(value)
        if isinstance(value, torch.optim.Optimizer):
            return self._optimizer(value)
        found: Any = getattr(value, "fully_sharded", None) if isinstance(value, nn.Module) else None
        if isinstance(found, FullySharded):
            return self._fully_sharded(value, found)
        return super()._make(value)

    def _without_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor of the same size, in memory that it shares as the original does; torch keeps nothing of it."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, tensor.element_size()
        with self._mode:
            flat = self._storages.get((key, tensor.dtype))
            if flat is None:
                flat = self._storages[key, tensor.dtype] = torch.empty(storage.nbytes() // size, dtype=tensor.dtype)
            return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()

    # Tensors ---------------------------------------------------------------------------------------------------------

    def _sharded(self, tensor: ShardedTensorBase) -> Any:
        with torch.no_grad():
            made = self._of_frame(type(tensor), tensor._frame)
        if tensor.requires_grad and tensor.is_leaf:
            made.requires_grad_()
        if tensor.is_leaf and tensor.grad is not None:
            made.grad = self._of_frame(type(tensor), tensor.grad._frame)
        if getattr(tensor, "_is_param", False):
            made._is_param = True
        return made

    def _of_frame(self, kind: Any, frame: Frame) -> Any:
        layout = frame.layout.moved(lambda place: place.on(CPU))
        rows = tuple(layout.rows_on(dist.get_rank()))
        group = self._group(frame.process_group)
        there = Frame.of(layout, placed(frame.spec, layout), rows, frame.dtype, group)
        with self._mode:
            locals_ = [torch.empty(layout.extent(row), dtype=frame.dtype) for row in rows]
        return kind._wrap(Parts(there, locals_))

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        """A copy; it makes the states of a fully sharded model anew, in flat memory."""
        state = optimizer.state
        kept = {one: state[one] for one in state if id(one) not in self._models}
        optimizer.state = type(state)(state.default_factory, kept)
        try:
            return super()._make(optimizer)
        finally:
            optimizer.state = state

    # Groups ----------------------------------------------------------------------------------------------------------

    def _group(self, group: Any) -> Any:
        """The group that this rank has where the other one has that group."""
        if group is None:
            return None
        ranks = self._groups.get(id(group))
        if ranks is None:
            raise ProcessGroupError("a tensor of this step is in a process group that was destroyed")
        if len(ranks) == self._world:
            return dist.group.WORLD
        here = shifted(ranks, dist.get_rank())
        if here not in self._new_groups:
            self._new_groups[here] = dist.new_group(list(here))
        return self._new_groups[here]

    def _mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """The same mesh; of a part of a mesh, the part through this rank."""
        root = mesh._get_root_mesh()
        names = cast(Sequence[str], root.mesh_dim_names)
        if root is mesh:
            return DeviceMesh(
                "cpu", np.array(mesh_ranks(mesh)).tolist(), mesh_dim_names=tuple(names) if names else None
            )
        return self.of(root)[tuple(mesh.mesh_dim_names or ())]  # type: ignore[no-any-return]

    # Fully sharded models --------------------------------------------------------------------------------------------

    def _fully_sharded(self, model: nn.Module, found: FullySharded) -> nn.Module:
        """A copy with the parameters that the model had before, sharded again in the same way."""
        each = [one for unit in found.units for one in unit.parameters]
        for one in each:
            self._kept.append(one.sharded)
            self._made[id(one.sharded)] = self._before(one.sharded, one.gathered)
        again = found.again
        made: nn.Module = self._object(model)
        vars(made).pop("fully_sharded", None)
        for module in made.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for number in found.hooks:
                    hooks.pop(number, None)
        options = {name: self.of(option) for name, option in again.keywords.items()}
        with self._mode:
            again.func(made, **options)
        new = [one for unit in cast(Any, made).fully_sharded.units for one in unit.parameters]
        for old, one in zip(each, new, strict=True):
            self._made[id(old.sharded)] = one.sharded
        return made

    def _before(self, sharded: ShardedTensorBase, gathered: Frame | None) -> Any:
        """The parameter before the model was fully sharded: plain, or as another plan has cut it."""
        with self._mode:
            if gathered is not None:
                made = self._of_frame(type(sharded), gathered)
                made._is_param = True
            else:
                made = nn.Parameter(torch.empty(sharded.shape, dtype=sharded.dtype), sharded.requires_grad)
        return made.requires_grad_(sharded.requires_grad)


def shifted(ranks: Ranks, rank: int) -> Ranks:
    """The ranks of the group that a rank has, where others have a group of these: groups repeat through the world.

    >>> shifted((0, 2), 3), shifted((0, 1), 3), shifted((0, 1), 0)
    ((1, 3), (2, 3), (0, 1))
    """
    if rank in ranks:
        return ranks
    strides = {later - earlier for earlier, later in pairwise(ranks)} or {1}
    stride = strides.pop()
    if strides or stride <= 0:
        raise ProcessGroupError(f"what rank {rank} has in place of a group of the ranks {list(ranks)} is not known")
    number = (rank // stride) % len(ranks)
    first = rank - number * stride
    return tuple(range(first, first + stride * len(ranks), stride))
