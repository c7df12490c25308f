"""What of a parameter each row of ranks has: all of it, or the boxes that another plan gave to the row.

A plan such as tensor parallelism on a mesh of two axes cuts parameters along one axis and has replicas along the other.
The ranks of a row are those replicas: `fully_shard` shares out the boxes of a row among its ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.errors import PlanError
from shardwise.nn.fully_sharded.cuts import Box
from shardwise.tensor import ShardedTensor

if TYPE_CHECKING:
    from shardwise.nn.fully_sharded.rank_groups import RankGroups


def is_cut(parameter: torch.Tensor) -> bool:
    """Whether another plan has cut a parameter."""
    return isinstance(parameter, ShardedTensor) and not parameter._layout.is_whole_everywhere


def row_boxes(name: str, parameter: torch.Tensor, groups: RankGroups) -> list[list[Box]]:
    """The boxes of a parameter in each row; one list for all rows where they have the same, which is all of it."""
    whole = tuple(parameter.shape)
    if not isinstance(parameter, ShardedTensor) or parameter._layout.is_whole_everywhere:
        return [[((0,) * len(whole), whole)]]
    layout, found = parameter._layout, []
    for ranks in groups.ranks.tolist():
        held = [layout.at(layout.rows_on(rank)) for rank in ranks]
        boxes = [
            [(tuple(low), tuple(size)) for low, size in zip(one.offsets.tolist(), one.sizes.tolist(), strict=True)]
            for one in held
        ]
        if any(other != boxes[0] for other in boxes):
            raise PlanError(
                f"{name!r} is not replicated over ranks {ranks}, which share out the parameters: fully_shard takes a "
                "model that was cut along the other axis of the mesh, as in plans.tensor_parallel(model, mesh['tp']) "
                "and fully_shard(model, mesh=mesh['dp'])"
            )
        if not any(torch.Size(size).numel() for _, size in boxes[0]):
            raise PlanError(f"ranks {ranks} hold nothing of {name!r}: give each rank of the other axis a share of it")
        found.append(boxes[0])
    if sum(torch.Size(size).numel() for boxes in found for _, size in boxes) != parameter.numel():
        raise PlanError(
            f"some of {name!r} lies in several of the rows {groups.ranks.tolist()}: cut it along the other axis so "
            "that each element lies in one row, or leave it out of the plan"
        )
    return found
