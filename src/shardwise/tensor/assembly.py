"""The parts of a new sharded tensor: from allocated shards, every rank's own shards, or one local tensor each.

Each function checks all that can be checked, and gives the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.comm.agreement import in_step, in_step_sharing
from shardwise.comm.group import Fields, group_ranks, is_member, locate_all, locate_places, or_default
from shardwise.errors import LayoutError, ProcessGroupError, PropertyError, ShardCountError, SpecError
from shardwise.layout import Layout, Places, parse_size
from shardwise.layout.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.layout.placement import WITHOUT_INDEX, Placement, same_device
from shardwise.layout.specs import ShardingSpec, infer_chunk_or_enumerable
from shardwise.tensor.dispatch import require_plain, summary
from shardwise.tensor.frame import Frame, Parts
from shardwise.tensor.metadata_merge import (
    build_metadata_from_local_shards,
    infer_size,
    merge_metadata,
    metadata_from_json,
    metadata_to_json,
)
from shardwise.tensor.random import Draw
from shardwise.tensor.random.fill import fill_random
from shardwise.tensor.shard import Shard
from shardwise.tensor.shorthand import ShardingLike, parse_sharding

Fill = Callable[[torch.Tensor], object]


def _parts(
    layout: Layout,
    spec: ShardingSpec,
    rows: tuple[int, ...],
    properties: TensorProperties,
    process_group: ProcessGroup | None,
    tensors: list[torch.Tensor],
    shards: list[Shard] | None = None,
) -> Parts:
    frame = Frame.of(layout, spec, rows, properties.dtype, process_group)
    held = tensors or [shard.tensor for shard in shards or ()]
    if held and held[0].device.type not in WITHOUT_INDEX:  # the placement may be "cuda" without an index
        frame = replace(frame, device=held[0].device)
    return Parts(frame, tensors, shards, properties.requires_grad, properties.pin_memory)


def flatten_size(size: Sequence[Any]) -> torch.Size:
    """A size given as numbers or as one sequence of them."""
    return parse_size(_unpacked(size))


def _unpacked(size: Sequence[Any]) -> Sequence[Any]:
    return size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size


def create_tensor_from_params(
    *size: Any, local_device: torch.device, tensor_properties: TensorProperties
) -> torch.Tensor:
    """An uninitialised local tensor with these properties."""
    return torch.empty(
        *size,
        dtype=tensor_properties.dtype,
        layout=tensor_properties.layout,
        device=local_device,
        requires_grad=tensor_properties.requires_grad,
        memory_format=tensor_properties.memory_format,
        pin_memory=tensor_properties.pin_memory,
    )


def allocate(
    how: ShardingLike,
    size: Sequence[Any],
    asked: TensorProperties,
    process_group: ProcessGroup | None,
    *,
    fill: Fill | None = None,
    draw: Draw | None = None,
    generator: torch.Generator | None = None,
    verb: str = "empty",
    init_rrefs: bool = False,
) -> Parts:
    """New shards of this size and spec, each filled by ``fill``, or together by ``draw``."""
    group = or_default(process_group)

    def work() -> tuple[Parts, Fields]:
        spec = parse_sharding(how, process_group=group)
        properties = replace(asked, dtype=torch.empty(0, dtype=asked.dtype).dtype)  # `float` is a dtype, too
        _require_supported(properties)
        whole = flatten_size(size)
        layout = locate_all(spec.layout(whole), group)
        rows = layout.rows_on(dist.get_rank()) if is_member(group) else ()
        tensors = []
        for row in rows:
            sizes = layout.extent(row)
            tensor = create_tensor_from_params(
                sizes, local_device=layout.place(row).device, tensor_properties=properties
            )
            tensors.append(tensor)
        # A rank without shards fills an empty tensor, so that an error is raised on all ranks.
        nothing = torch.empty(0, dtype=properties.dtype, device=layout.some_device)
        with torch.no_grad():
            if fill is not None:
                for tensor in tensors or [nothing]:
                    fill(tensor)
            elif draw is not None:
                draw.into(nothing, generator)
        parts = _parts(layout, spec, rows, properties, group, tensors)
        return parts, {"verb": verb, "init_rrefs": init_rrefs, **agreement_fields(layout, spec, properties)}

    parts = in_step(group, work)
    if draw is not None and is_member(group):  # only now, so that generators stay equal when a rank fails
        fill_random(parts.frame, parts.tensors, draw, generator)
    return parts


def from_local_tensor(
    local_tensor: torch.Tensor,
    spec: ShardingSpec,
    global_size: Sequence[Any],
    process_group: ProcessGroup | None,
    *,
    init_rrefs: bool = False,
) -> Parts:
    """The one shard that this spec gives to this rank, filled by this tensor."""
    group = or_default(process_group)

    def work() -> tuple[Parts, Fields]:
        require_spec(spec)
        require_plain(local_tensor, "a local tensor")
        _require_supported(TensorProperties(layout=local_tensor.layout))
        if not local_tensor.is_contiguous():
            raise PropertyError("local_tensor is not a contiguous Tensor.")
        properties = TensorProperties.create_from_tensor(local_tensor)
        layout = locate_all(spec.layout(flatten_size(global_size)), group)
        rows = layout.rows_on(dist.get_rank())
        if len(rows) > 1:
            raise ShardCountError(
                f"one local tensor is given, but the spec puts {len(rows)} shards on rank {dist.get_rank()}: "
                "use init_from_local_shards"
            )
        shards = [Shard(local_tensor, layout.shard_metadata(row)) for row in rows]
        parts = _parts(layout, spec, rows, properties, group, [shard.tensor for shard in shards])
        return parts, {"verb": "from tensor", "init_rrefs": init_rrefs, **agreement_fields(layout, spec, properties)}

    return in_step(group, work)


def from_global_metadata(
    local_shards: list[Shard],
    metadata: ShardedTensorMetadata,
    spec: ShardingSpec | None,
    process_group: ProcessGroup | None,
) -> Parts:
    """These local shards, which must be what the metadata says of this rank. No communication."""
    properties = metadata.tensor_properties
    if len(metadata.shards_metadata) == 0:
        raise LayoutError("shards_metadata must not be empty!")
    if process_group is not None:
        here = dist.get_rank()
        places = Places.of(shard.placement for shard in metadata.shards_metadata)
        mine = list(locate_places(places, process_group).rows_on(here))
        if len(mine) != len(local_shards):
            raise ShardCountError(
                f"Number of local shards ({len(local_shards)}) does not match number of local shards metadata "
                f"in sharded_tensor_metadata ({len(mine)}) on rank ({here})"
            )
    else:
        mine = list(range(len(metadata.shards_metadata)))
    _require_supported(properties)
    for shard in local_shards:
        _require_matching(shard, properties)
    layout = Layout.from_metadata(metadata.shards_metadata, metadata.size)
    if process_group is not None:
        layout = locate_all(layout, process_group)
    if spec is None:
        spec = infer_chunk_or_enumerable(metadata.shards_metadata)
    rows = match_rows(local_shards, layout, mine)
    if list(rows) != sorted(rows):  # shards are in the order of the layout
        order = sorted(range(len(rows)), key=rows.__getitem__)
        rows, local_shards = tuple(sorted(rows)), [local_shards[k] for k in order]
    return _parts(layout, spec, rows, properties, process_group, [], local_shards)


def from_local_shards(
    local_shards: list[Shard],
    global_size: Sequence[Any],
    process_group: ProcessGroup | None,
    *,
    init_rrefs: bool = False,
) -> Parts:
    """Every rank's own shards, whose metadata is exchanged and must make up a tensor."""
    group = or_default(process_group)
    if not is_member(group):
        raise ProcessGroupError("this rank is not in the process group, so it has no part in putting a tensor together")

    def work() -> tuple[None, Fields, Any]:
        known = parse_size([0 if dim is None else dim for dim in _unpacked(global_size)])
        size = [None if given is None else dim for given, dim in zip(_unpacked(global_size), known, strict=True)]
        if not isinstance(local_shards, list | tuple):
            raise PropertyError(f"local_shards must be a list of Shard, found {summary(local_shards)}")
        record = None
        if local_shards:
            record = metadata_to_json(build_metadata_from_local_shards(local_shards, known, dist.get_rank(), group))
        fields = {"verb": "init_from_local_shards", "init_rrefs": init_rrefs, "global_size": size}
        return None, fields, record

    _, records = in_step_sharing(group, work)
    # From here on every rank computes the same from the same input, so all raise the same error.
    size = list(_unpacked(global_size))
    gathered = [None if record is None else metadata_from_json(record) for record in records]
    metadata = merge_metadata(gathered, group_ranks(group))
    if None in size:
        infer_size(metadata, size)
    else:
        metadata.size = parse_size(size)
    layout = locate_all(Layout.from_metadata(metadata.shards_metadata, metadata.size), group)
    rows = layout.rows_on(dist.get_rank())
    shards = list(local_shards)
    if None in size:
        shards = [
            Shard(shard.tensor, layout.shard_metadata(row)) for shard, row in zip(local_shards, rows, strict=True)
        ]
    spec = infer_chunk_or_enumerable(metadata.shards_metadata)
    return _parts(layout, spec, rows, metadata.tensor_properties, group, [], shards)


# Checks ----------------------------------------------------------------------------------------------------------


def require_spec(spec: object) -> None:
    """Raise unless this is a spec."""
    if not isinstance(spec, ShardingSpec):
        raise SpecError(f"Expecting ShardingSpec but got: {type(spec)}")


def require_dense(tensor: object, purpose: str) -> None:
    """Raise unless this is a plain strided tensor, neither quantised nor nested."""
    if not isinstance(tensor, torch.Tensor):
        raise PropertyError(f"{purpose} is a tensor, found {type(tensor).__name__}")
    require_plain(tensor, purpose)
    if tensor.layout != torch.strided:
        raise PropertyError(f"Only torch.strided layout is currently supported: {purpose} has {tensor.layout}")
    if tensor.is_quantized or tensor.is_nested:
        kind = f"quantised ({tensor.dtype}): take its dequantize()" if tensor.is_quantized else "nested"
        raise PropertyError(f"{purpose} is a tensor of plain values, found one that is {kind}")


def _require_supported(properties: TensorProperties) -> None:
    if properties.layout != torch.strided:
        raise PropertyError(f"Only torch.strided layout is currently supported, found {properties.layout}")
    if properties.memory_format != torch.contiguous_format:
        raise PropertyError(
            f"Only torch.contiguous_format memory_format is currently supported, found {properties.memory_format}"
        )


def _require_matching(shard: Shard, properties: TensorProperties) -> None:
    """Raise unless the tensor of a local shard is what its metadata and the tensor's properties say."""
    tensor, metadata = shard.tensor, shard.metadata
    place = Placement.of(metadata.placement)
    expected = [
        ("layout", "tensor property", properties.layout, tensor.layout),
        ("size", "local ShardMetadata", metadata.shard_sizes, list(tensor.size())),
        ("pin_memory", "tensor property", properties.pin_memory, tensor.is_pinned()),
        ("device", "local ShardMetadata", place.device, tensor.device),
        ("dtype", "tensor property", properties.dtype, tensor.dtype),
        ("requires_grad", "tensor property", properties.requires_grad, tensor.requires_grad),
    ]
    for name, source, wanted, found in expected:
        if wanted != found and not (name == "device" and same_device(place.device, tensor.device)):
            raise PropertyError(
                f"Local shards' tensor {name} property is incompatible with {source} on rank {place.rank}: "
                f"{source} {name}={wanted}, local shard tensor {name}={found}."
            )
        if name == "layout" and not tensor.is_contiguous():
            raise PropertyError("Only torch.contiguous_format memory_format is currently supported")


def match_rows(local_shards: list[Shard], layout: Layout, candidates: list[int]) -> tuple[int, ...]:
    """The row of the layout, among the rows of this rank, that has the box of each local shard.

    The rank in the record of a local shard does not count: FSDP1 writes the group rank there.
    """
    free: dict[tuple[int, ...], list[int]] = {}
    for row in candidates:
        free.setdefault(_box(layout.shard_metadata(row), layout.size), []).append(row)
    rows = []
    for shard in local_shards:
        same, place = free.get(_box(shard.metadata, layout.size)), Placement.of(shard.metadata.placement)
        if not same:
            raise SpecError(f"local shard {shard.metadata} is not among this rank's shards in the global metadata")
        rows.append(
            next((row for row in same if layout.place(row) == place), same[0])
        )  # several rows if they are empty
        same.remove(rows[-1])
    return tuple(rows)


def _box(metadata: ShardMetadata, size: torch.Size) -> tuple[int, ...]:
    """A box by its offsets and sizes; in a record, an empty box may lie beyond the end."""
    return *(min(pair) for pair in zip(metadata.shard_offsets, size, strict=False)), *metadata.shard_sizes


def agreement_fields(layout: Layout, spec: ShardingSpec, properties: TensorProperties) -> Fields:
    """The fields that must be equal on all ranks that make a tensor."""
    return {
        "global_size": list(layout.size),
        "dtype": properties.dtype,
        "requires_grad": properties.requires_grad,
        "pin_memory": properties.pin_memory,
        "sharding_spec": f"{type(spec).__name__} {layout.outline}",
    }
