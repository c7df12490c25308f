"""Filling the shards of a tensor with random numbers, which depend on the generator and the position of each element.

With ranks seeded alike, every rank draws the numbers of a plain tensor of the whole size and keeps its own boxes; the
generators of all ranks advance alike. The numbers are torch's own where a rank can have them cheaply (`flat`), else
drawn by tiles (`tiles`). The choice depends on the size of the whole tensor, the function and the devices of the
group, never on the layout or the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise import settings
from shardwise.comm.agreement import in_step_sharing, record_call, step_of_op
from shardwise.comm.group import CallFingerprint, Fields, cached_per_group, is_member, is_threaded, talks
from shardwise.comm.transfer import make_plan, move
from shardwise.layout import Layout
from shardwise.tensor.frame import Frame
from shardwise.tensor.random.flat import chunk_on, fill_flat, follows_memory, numbers_of
from shardwise.tensor.random.generators import Draw, default_generator, next_seed, state_digest
from shardwise.tensor.random.tiles import fill_tiles
from shardwise.torch_private import current_backward

GENERATOR_STATE = (  # a field that ranks compare, and what to do where it differs
    "state of the random generator: ranks that hold the same elements must draw the same numbers, so seed all ranks "
    "alike with torch.manual_seed, and draw a rank's own numbers from a torch.Generator of its own"
)


def fill_random(
    frame: Frame,
    tensors: Sequence[torch.Tensor],
    draw: Draw,
    generator: torch.Generator | None = None,
    order: Sequence[int] | None = None,
) -> None:
    """Fill the local tensors of this frame. Every rank of the group calls it; a digest is compared.

    The ``order`` is that of the dims in the memory of the plain tensor, where the plain tensor is not contiguous.
    Where each rank draws for itself, a shard is filled as a plain tensor of its size, from this rank's generator, and
    replicas get the values of the first one.
    """
    group = frame.process_group
    if group is not None and not is_member(group):
        return
    if draws_per_rank(group):
        _fill_per_rank(frame, tensors, draw, generator)
        equalize_replicas(frame.layout, tensors, frame.dtype, group)
        return
    layout, device = frame.layout, tensors[0].device if tensors else frame.device
    source = default_generator(device) if generator is None else generator
    if source is None:
        return
    tensors = [tensor.detach() for tensor in tensors]
    with torch.no_grad():
        # A rank without shards learns from an empty tensor, as the others do, whether the draw can be made.
        draw.into(torch.empty(0, dtype=frame.dtype, device=device), generator)
        if layout.has_replicas:
            require_equal_state(layout, state_digest(source), group)
        here = layout.at(frame.rows)
        boxes = list(zip(here.offsets.tolist(), here.ends.tolist(), strict=True))
        types = layout.places.device_types
        numbers = None
        if _draw_equally(types, device, group):
            numbers = numbers_of(draw, layout.size.numel(), frame.dtype, device, source)
        if numbers is not None:
            size: Sequence[int] = layout.size
            if order is not None and device.type == "cpu" and follows_memory(draw, frame.dtype):
                size = [size[dim] for dim in order]
                boxes = [([low[dim] for dim in order], [high[dim] for dim in order]) for low, high in boxes]
                tensors = [tensor.permute(*order) for tensor in tensors]
            fill_flat(draw, size, boxes, tensors, numbers)
        else:
            seed = next_seed(source if generator is not None or len(types) == 1 else torch.default_generator)
            fill_tiles(draw, layout.size, boxes, tensors, seed)


def _fill_per_rank(
    frame: Frame, tensors: Sequence[torch.Tensor], draw: Draw, generator: torch.Generator | None
) -> None:
    device = tensors[0].device if tensors else frame.device
    if generator is not None or default_generator(device) is not None:
        with torch.no_grad():
            for tensor in tensors:
                draw.into(tensor.detach(), generator)


def draws_per_rank(process_group: ProcessGroup | None) -> bool:
    """Whether each rank draws for its own shards: within `own_draws`, or if ranks are threads with one generator."""
    return settings.current().own_draws or (process_group is not None and is_threaded(process_group))


def require_equal_state(layout: Layout, state: str, process_group: ProcessGroup | None) -> None:
    """Let ranks that draw for the same elements find out if their generators differ. Nothing is sent for it.

    Not in a backward: there a checkpoint draws again from an earlier state, and only on some ranks. Nor while a CUDA
    graph is captured, which has no state yet.
    """
    in_backward = current_backward() != -1
    if process_group is not None and talks(process_group) and state and not in_backward:
        record_call(process_group, CallFingerprint({"verb": "draw", "tensor": layout.outline, GENERATOR_STATE: state}))


def _draw_equally(device_types: frozenset[str], device: torch.device, process_group: ProcessGroup | None) -> bool:
    """Whether all ranks of a group draw by the same algorithm: on CUDA it depends on the number of processors."""
    if len(device_types) > 1:
        return False
    if device.type == "cpu" or process_group is None or not talks(process_group):
        return True
    known = _known_chunks(process_group)
    if not known:  # on all ranks alike, whichever device each of them draws on first
        chunks = in_step_sharing(process_group, lambda: (None, {"verb": "draw"}, chunk_on(device)))[1]
        known.append(len(set(chunks)) == 1)
    return known[0]


@cached_per_group()
def _known_chunks(_: ProcessGroup) -> list[bool]:
    """Whether the ranks share a chunk, once they have compared."""
    return []


def equalize_replicas(
    layout: Layout, tensors: Sequence[torch.Tensor], dtype: torch.dtype, process_group: ProcessGroup | None
) -> None:
    """Give every replica the values of the first one. Every rank of the group calls it; without replicas, nothing."""
    if not layout.has_replicas or process_group is None or not is_member(process_group):
        return

    def work() -> tuple[None, Fields]:
        return None, {"verb": "draw alike for replicas", "tensor": layout.outline, "dtype": dtype}

    step = step_of_op(process_group, work)
    rows = layout.rows_on(dist.get_rank())
    mine = [tensor.detach().clone() for row, tensor in zip(rows, tensors, strict=True) if layout.is_first(row)]
    plan = make_plan(layout.once, layout)
    outs = [tensor.detach() for tensor in tensors]
    move(plan, mine, process_group, dtype=dtype, outs=outs, ready=step.finish).wait()
