"""Cutting a batch: each rank takes its pieces of every sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise import settings
from shardwise.comm.agreement import in_step_sharing
from shardwise.comm.group import Fields, cached_per_group, group_ranks
from shardwise.comm.value_digest import digest
from shardwise.errors import PlainValueError, PropertyError
from shardwise.nn.context_parallel.pieces import RankGrid
from shardwise.nn.context_parallel.token_labels import with_token_values
from shardwise.ops.attention import Documents
from shardwise.tensor import ShardedTensor
from shardwise.tensor.assembly import require_dense
from shardwise.tensor.frame import Frame, Parts
from shardwise.torch_private import pytree

SEQUENCE = 1  # the dim of the sequence, behind that of the samples


def cut_batch(batch: Any, grid: RankGrid, group: ProcessGroup) -> Any:
    """The batch with each rank's pieces. Every rank of the group calls it; ranks of a row have the same samples."""

    def work() -> tuple[tuple[list[Any], Any], Fields, tuple[int, str, str]]:
        prepared = with_token_values(batch) if isinstance(batch, Mapping) else batch
        documents = prepared.pop("documents", None) if isinstance(prepared, dict) else None
        leaves, structure = pytree.tree_flatten(prepared)
        tensors = [checked(leaf) for leaf in leaves if has_sequence(leaf)]
        sizes = sorted({tuple(one.shape[:2]) for one in tensors})
        if len(sizes) != 1:
            raise PropertyError(f"the tensors of a batch have the same samples and positions; found {sizes}")
        fields: dict[str, object] = {"verb": "cut", "structure": str(structure)}
        for number, one in enumerate(tensors):
            fields[f"tensor {number}"] = f"{one.dtype} on {one.device.type}, {list(one.shape[SEQUENCE:])}"
        values = "".join(digest(one, None) for one in tensors) if settings.current().validate else ""
        said = "" if documents is None else Documents.of(documents)
        return (leaves, structure), fields, (sizes[0][0], said, values)

    (leaves, structure), told = in_step_sharing(group, work)
    number_of = {rank: k for k, rank in enumerate(group_ranks(group))}
    rows = [[number_of[rank] for rank in row] for row in grid.ranks]
    for row in rows:
        _require_alike(row, told, group_ranks(group))
    samples = tuple(int(told[row[0]][0]) for row in rows)
    documents = _joined([told[row[0]][1] for row in rows], samples)
    made = [_pieces(leaf, grid, samples, group) if has_sequence(leaf) else leaf for leaf in leaves]
    result = pytree.tree_unflatten(made, structure)
    if documents is not None:
        result["documents"] = documents
    return result


def has_sequence(leaf: Any) -> bool:
    """Whether this is a tensor with a dim of positions behind that of samples."""
    return isinstance(leaf, torch.Tensor) and leaf.ndim > SEQUENCE


def checked(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, if a batch may have it."""
    require_dense(tensor, "what a plan cuts")
    if tensor.requires_grad:
        raise PropertyError("a batch is cut before anything is computed from it: give tensors that want no gradient")
    return tensor


def _require_alike(row: Sequence[int], told: Sequence[Any], ranks: Sequence[int]) -> None:
    """Raise, as all ranks do, unless the ranks of a row have the same samples."""
    first = row[0]
    others = [ranks[k] for k in row if told[k] != told[first]]
    if others:
        raise PlainValueError(
            f"ranks that have pieces of the same sequences cut the same batch, but that of rank {others[0]} differs "
            f"from that of rank {ranks[first]}: read the same samples there, or broadcast them"
        )


def _joined(texts: Sequence[str], samples: Sequence[int]) -> Documents | None:
    """The documents of all rows' samples."""
    if not any(texts):
        return None
    each: list[tuple[int, ...]] = []
    for text, count in zip(texts, samples, strict=True):
        found = Documents(text).by_sample(count) if text else ((0,),)
        each += found * count if len(found) == 1 else found
    return Documents.of(each)


def _pieces(tensor: torch.Tensor, grid: RankGrid, samples: tuple[int, ...], group: ProcessGroup) -> ShardedTensor:
    frame = _frame(group, grid, tuple(tensor.shape[1:]), samples, tensor.device.type, tensor.dtype)
    first = sum(samples[: next(k for k, row in enumerate(grid.ranks) if dist.get_rank() in row)])
    parts = []
    for row in frame.rows:
        own, *others = frame.layout.index(row)
        index = slice(own.start - first, own.stop - first), *others
        parts.append(tensor[index].clone(memory_format=torch.contiguous_format))
    return ShardedTensor._wrap(Parts(frame, parts))


@cached_per_group(maxsize=256)
def _frame(
    group: ProcessGroup,
    grid: RankGrid,
    rest: tuple[int, ...],
    samples: tuple[int, ...],
    device_type: str,
    dtype: torch.dtype,
) -> Frame:
    layout = grid.layout([0, *rest], samples, SEQUENCE, device_type)
    return Frame.of(layout, None, layout.rows_on(dist.get_rank()), dtype, group)
