"""Pickles of sharded tensors: one rank's shards, and plain values that say which part of the tensor they are.

A pickle loads on the rank that wrote it, in a group of the same size; `torch.load` accepts it with
``weights_only=True`` too. Everything read is checked again. Pickles of the old system name classes of
`torch.distributed._shard`, so they load only where the drop-in replaces these.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.comm.group import current_process_group, locate_all
from shardwise.errors import ProcessGroupError, PropertyError
from shardwise.layout import Layout, parse_size
from shardwise.layout.geometry import Boxes
from shardwise.layout.placement import Placement, rank_device
from shardwise.layout.specs import ShardingSpec, infer_chunk_or_enumerable, placed, spec_of
from shardwise.tensor.assembly import match_rows
from shardwise.tensor.frame import Frame, Parts
from shardwise.tensor.saved_files import INSTEAD, require_own_file

if TYPE_CHECKING:
    from shardwise.tensor.base import ShardedTensorBase


VERSION = 1


def state_of(tensor: ShardedTensorBase) -> dict[str, Any]:
    """The state that is pickled: plain values, and the local tensors."""
    if get_spawning_popen() is not None:  # unpickled before the new process can have a process group
        raise ProcessGroupError(
            "a process that is started now, as the workers of a DataLoader are, is no rank and cannot be given "
            f"{tensor!r}. Give it plain tensors instead: full_tensor(), or local_tensor() for the part of one rank; or "
            "let the DataLoader have num_workers=0"
        )
    if tensor._frame.process_group is not None:
        require_own_file(dist.get_world_size(tensor._frame.process_group))
    layout = tensor._layout
    places, place_of = layout.places.distinct
    return {
        "version": VERSION,
        "size": list(layout.size),
        "offsets": layout.all_record_offsets.tolist(),
        "sizes": layout.boxes.sizes.tolist(),
        "places": [str(place) for place in places],
        "ranks": [place.rank for place in places],
        "place_of": place_of.tolist(),
        "rows": list(tensor._frame.rows),
        "tensors": list(tensor._local_tensors()),
        "dtype": tensor.dtype,
        "requires_grad": tensor.requires_grad,
        "pin_memory": tensor._pinned,
        "spec": tensor._sharding_spec if _makes(tensor._sharding_spec, layout) else spec_of(layout),
        "group": None if tensor._frame.process_group is None else _membership(tensor._frame.process_group),
        "probe": torch.empty(0, device=tensor.device),  # shows a rank without shards where `map_location` sends them
        "init_rrefs": tensor._init_rrefs,
        "is_param": bool(getattr(tensor, "_is_param", False)),
    }


def _makes(spec: ShardingSpec, layout: Layout) -> bool:
    """Whether a spec makes these boxes on these places: a caller may have assigned another spec."""
    made = spec.layout(layout.size)
    return made == layout or made.order_of(layout) is not None


def _membership(process_group: Any) -> dict[str, int]:
    """The rank of this process, and the number of ranks, in the group and in the job."""
    return {
        "Local rank": dist.get_rank(process_group),
        "Global rank": dist.get_rank(),
        "Local world size": dist.get_world_size(process_group),
        "Global world size": dist.get_world_size(),
    }


def restore(state: dict[str, Any]) -> Parts:
    """The parts of a pickled tensor, all checked."""
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise PropertyError(f"not a pickled ShardedTensor of version {VERSION}: {type(state).__name__}")
    try:
        group = None if state["group"] is None else group_as_saved(state["group"])
        return _parts_as_saved(state, group)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise PropertyError(f"a pickled ShardedTensor with broken contents: {error!r}") from error


def _parts_as_saved(state: dict[str, Any], group: ProcessGroup | None) -> Parts:
    flags = {name: state[name] for name in ("dtype", "requires_grad", "pin_memory")}
    tensors, rows = list(state["tensors"]), tuple(state["rows"])
    return checked_parts(_layout_as_saved(state), state["spec"], rows, tensors, state["probe"], group, **flags)


def checked_parts(
    layout: Layout,
    spec: Any,
    rows: tuple[int, ...],
    tensors: list[torch.Tensor],
    probe: torch.Tensor,
    group: ProcessGroup | None,
    *,
    dtype: torch.dtype,
    requires_grad: bool,
    pin_memory: bool,
) -> Parts:
    """The parts of these tensors for these rows, checked, on the devices where the tensors are now.

    ``probe`` is an empty tensor from the same file: it shows a rank without shards where `map_location` sends them.
    """
    if not isinstance(spec, ShardingSpec) or not _makes(spec, layout):
        raise PropertyError("a pickled ShardedTensor whose spec does not make its layout")
    here = rows if group is None else layout.rows_on(dist.get_rank())
    if rows != here or len(rows) != len(tensors):
        raise PropertyError(f"a pickled ShardedTensor with {len(tensors)} tensors for shards {rows}, expected {here}")
    for row, tensor in zip(rows, tensors, strict=True):
        found = (list(tensor.size()), tensor.dtype, tensor.requires_grad)
        wanted = (layout.extent(row), dtype, requires_grad)
        if found != wanted:
            raise PropertyError(f"a pickled ShardedTensor whose shard {row} is {found}, expected {wanted}")
    moved = _on_loaded_devices(layout, rows, [*tensors, probe])
    frame = Frame.of(moved, spec if moved is layout else placed(spec, moved), rows, dtype, group)
    return Parts(frame, tensors, None, bool(requires_grad), bool(pin_memory))


def _layout_as_saved(state: dict[str, Any]) -> Layout:
    size = parse_size(state["size"])
    boxes = Boxes.parse(state["offsets"], state["sizes"], len(size))
    places = [
        replace(Placement.of(place), rank=rank) for place, rank in zip(state["places"], state["ranks"], strict=True)
    ]
    placements = [places[number] for number in state["place_of"]]
    # Replicas are allowed here: the caller checks that the spec makes this layout.
    return Layout.checked(size, boxes, placements, str, replicas=True)


def _on_loaded_devices(layout: Layout, rows: tuple[int, ...], tensors: list[torch.Tensor]) -> Layout:
    """The layout on the devices that `map_location` moved the shards to, assumed to be alike on other ranks."""
    *shards, probe = tensors
    here = {layout.place(row): shard.device for row, shard in zip(rows, shards, strict=True)}
    if not here:
        here = dict.fromkeys(layout.places[:1], probe.device)
    if all(place.device.type == device.type for place, device in here.items()):
        return layout

    def loaded(place: Placement) -> Placement:
        if place in here and rows:
            return place.on(here[place])
        return place if place.rank is None else place.on(rank_device(place.rank, probe.device.type))

    return layout.moved(loaded)


def group_as_saved(saved: dict[str, int]) -> Any:
    """The current group, if this process has the ranks in it that the writer had."""
    if not dist.is_initialized():
        raise ProcessGroupError(
            'Need to initialize default process group using "init_process_group" before loading ShardedTensor. '
            + _how_to_load(saved)
        )
    group = current_process_group()
    for name, value in _membership(group).items():
        if saved[name] != value:
            raise ProcessGroupError(
                f"{name} at save time was {saved[name]}, but at load time was {value}. {_how_to_load(saved)}"
            )
    return group


def _how_to_load(saved: dict[str, int]) -> str:
    """The end of an error: where a pickle loads, and how to save what loads elsewhere."""
    rank, size = (saved.get(name, "?") for name in ("Global rank", "Global world size"))
    return (
        f"A pickle holds one rank's shards, this one those of rank {rank} of {size}, and loads only there. "
        f"To save what loads elsewhere, {INSTEAD}"
    )


@dataclass
class ProcessGroupState:
    """The ranks of the process that wrote a pickle, in the group of the tensor and in the job."""

    local_rank: int
    global_rank: int
    local_world_size: int
    global_world_size: int


def restore_old(state: Any, device: torch.device) -> Parts:
    """The parts that the old system wrote, on the rank and in the group that wrote them. No communication.

    ``device`` is where `map_location` sends the tensor, which only counts on a rank that has no shards.
    """
    if not isinstance(state, tuple) or len(state) != 5:
        raise PropertyError(f"not a ShardedTensor as the old system pickles it: {type(state).__name__}")
    local_shards, metadata, saved, spec, _ = state
    try:
        group = group_as_saved({name.replace("_", " ").capitalize(): value for name, value in asdict(saved).items()})
        return _old_parts(local_shards, metadata, spec, torch.empty(0, device=device), group)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise PropertyError(f"a ShardedTensor pickled by the old system, with broken contents: {error!r}") from error


def _old_parts(local_shards: Any, metadata: Any, spec: Any, probe: torch.Tensor, group: ProcessGroup) -> Parts:
    records = metadata.shards_metadata
    layout = locate_all(Layout.from_metadata(records, metadata.size), group)
    if not isinstance(spec, ShardingSpec) or spec.layout(layout.size).order_of(layout) is None:
        spec = infer_chunk_or_enumerable(records)  # the old system did not check that they agree
    rows = match_rows(local_shards, layout, list(layout.rows_on(dist.get_rank())))
    order = sorted(range(len(rows)), key=rows.__getitem__)
    by_row = {rows[k]: local_shards[k].tensor for k in order}
    # Properties of the shards, which the records may contradict; a tensor that is read is never pinned.
    source = next(iter(by_row.values()), metadata.tensor_properties)
    return checked_parts(
        layout,
        spec,
        tuple(by_row),
        list(by_row.values()),
        probe,
        group,
        dtype=source.dtype,
        requires_grad=source.requires_grad,
        pin_memory=False,
    )
