"""Filling the shards of a tensor with random numbers, which depend on the generator and the position of each element.

With ranks seeded alike, every rank draws what a plain tensor of the whole size would have, and keeps its own boxes of
it; afterwards the generators of all ranks have gone on alike. The numbers are those of torch itself where a rank can
have them cheaply (`flat`); else they are drawn by tiles (`tiles`). Which of the two depends on the size of the whole
tensor, the function and the devices of the group, never on the layout or the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from shardwise import settings
from shardwise.layout import Layout
from shardwise.process_group import Said, follow, in_step_sharing, is_threaded, kept_for, talks
from shardwise.random.draw import Draw
from shardwise.random.flat import chunk_on, fill_flat, numbers_of
from shardwise.random.generators import default_generator, next_seed, state_digest
from shardwise.random.tiles import fill_tiles

SEED_ALIKE = (
    "the state of the random generator, which must be alike on ranks that hold the same elements: seed all ranks"
)
SEED_ALIKE += " alike with torch.manual_seed, and draw a rank's own numbers from a torch.Generator of its own"


def fill(
    draw: Draw,
    layout: Layout,
    rows: Sequence[int],
    tensors: Sequence[torch.Tensor],
    *,
    device: torch.device,
    dtype: torch.dtype,
    process_group: ProcessGroup | None,
    generator: torch.Generator | None = None,
) -> None:
    """Fill local tensors, which are these boxes of a layout. Every rank of the group calls it; a digest is compared.

    Where each rank draws for itself, a shard is filled as a plain tensor of its size, from this rank's generator.
    """
    source = default_generator(device) if generator is None else generator
    if source is None:
        return
    tensors = [tensor.detach() for tensor in tensors]
    with torch.no_grad():
        if draws_apart(process_group):
            for tensor in tensors:
                draw.into(tensor, generator)
            return
        # A rank without shards learns from an empty tensor, as the others do, whether the draw can be made.
        draw.into(torch.empty(0, dtype=dtype, device=device), generator)
        if layout.has_replicas:
            require_alike(layout, state_digest(source), process_group)
        here = layout.at(rows)
        boxes = list(zip(here.offsets.tolist(), here.ends.tolist(), strict=True))
        kinds = layout.places.device_types
        numbers = (
            numbers_of(draw, layout.size.numel(), dtype, device, source)
            if _are_alike(kinds, device, process_group)
            else None
        )
        if numbers is not None:
            fill_flat(draw, layout.size, boxes, tensors, numbers)
        else:
            seed = next_seed(source if generator is not None or len(kinds) == 1 else torch.default_generator)
            fill_tiles(draw, layout.size, boxes, tensors, seed)


def draws_apart(process_group: ProcessGroup | None) -> bool:
    """Whether each rank draws for its own shards: as `own_draws` says, or because ranks are threads with one generator.

    Then replicas must be made alike.
    """
    return settings.current().own_draws or (process_group is not None and is_threaded(process_group))


def require_alike(layout: Layout, state: str, process_group: ProcessGroup | None) -> None:
    """Have ranks that draw for the same elements find out if their generators differ. Nothing is sent for it.

    Not in a backward: a checkpoint draws again what has been drawn, from a state that was, and only on some ranks.
    """
    in_backward = torch._C._current_graph_task_id() != -1
    if process_group is not None and talks(process_group) and not in_backward:
        follow(process_group, Said({"verb": "draw", "tensor": layout.outline, SEED_ALIKE: state}))


def _are_alike(kinds: frozenset[str], device: torch.device, process_group: ProcessGroup | None) -> bool:
    """Whether all ranks of a group draw by the same algorithm: on CUDA it depends on the number of processors."""
    if len(kinds) > 1:
        return False
    if device.type == "cpu" or process_group is None or not talks(process_group):
        return True
    return kept_for(process_group, "chunk of draws", lambda: _share_chunk(process_group, device))


def _share_chunk(process_group: ProcessGroup, device: torch.device) -> bool:
    chunks = in_step_sharing(process_group, lambda: (None, {"verb": "draw"}, chunk_on(device)))[1]
    return len(set(chunks)) == 1
