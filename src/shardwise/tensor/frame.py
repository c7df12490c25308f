"""`Frame`: all about a sharded tensor but its data, shared by equal tensors; and `Parts`: a frame and local tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed import ProcessGroup

from shardwise.comm.group import cached_per_group
from shardwise.layout import Layout
from shardwise.layout.specs import FixedShardingSpec, ShardingSpec, spec_class_of, spec_of
from shardwise.tensor.shard import Shard


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """Everything about a sharded tensor but its data. The result of an op shares its input's frame."""

    layout: Layout
    rows: tuple[int, ...]  # the boxes of the layout on this rank
    dtype: torch.dtype
    device: torch.device  # of the shards on this rank, or the one that they would be on
    process_group: ProcessGroup | None
    size: torch.Size  # of the layout: one attribute access less
    single: bool = False  # whether this rank has one shard, and the layout no replicas: the simplest case of ops
    spec_class: type[ShardingSpec] = FixedShardingSpec
    given_spec: ShardingSpec | None = None  # that made the layout; else `spec` infers one
    key: tuple[Any, ...] | None = field(default=None, init=False, repr=False)  # see `make_key`

    def __deepcopy__(self, memo: object) -> Frame:
        return self  # frozen, and a group cannot be copied

    @property
    def spec(self) -> ShardingSpec:
        """The spec that made the layout, or that would."""
        return spec_of(self.layout) if self.given_spec is None else self.given_spec

    @staticmethod
    def of(
        layout: Layout,
        spec: ShardingSpec | None,
        rows: tuple[int, ...],
        dtype: torch.dtype,
        process_group: ProcessGroup | None,
    ) -> Frame:
        """A frame on the device that the layout gives to these rows."""
        device = layout.place(rows[0]).device if rows else _device_without_shards(layout)
        single = len(rows) == 1 and not layout.has_replicas
        return Frame(
            layout,
            rows,
            dtype,
            device,
            process_group,
            layout.size,
            single,
            spec_class_of(layout) if spec is None else type(spec),
            spec,
        )

    def make_key(self) -> tuple[Any, ...]:
        """What calls on tensors of equal frames have in common, for keys of caches; kept in ``key``."""
        key = (self.layout.digest, self.dtype, self.process_group, self.spec_class)
        object.__setattr__(self, "key", key)
        return key

    def with_spec(self, spec: ShardingSpec) -> Frame:
        """The same frame with another spec for its layout."""
        return replace(self, given_spec=spec, spec_class=type(spec))

    def with_dtype(self, dtype: torch.dtype) -> Frame:
        """The same frame for another dtype."""
        return self if dtype == self.dtype else _with_dtype(self.process_group, self, dtype)


@cached_per_group(maxsize=4096)
def _with_dtype(_: ProcessGroup | None, frame: Frame, dtype: torch.dtype) -> Frame:
    return replace(frame, dtype=dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The checked parts of a tensor: a frame, and either the local tensors or the caller's shards."""

    frame: Frame
    tensors: list[torch.Tensor]
    shards: list[Shard] | None = None
    requires_grad: bool = False
    pin_memory: bool = False


def _device_without_shards(layout: Layout) -> torch.device:
    """The device that a rank without shards would use: of the type that the others use."""
    device = layout.some_device
    if device.type in ("cpu", "meta"):
        return device
    module = torch.get_device_module(device.type)
    return torch.device(device.type, module.current_device()) if module.is_available() else device
