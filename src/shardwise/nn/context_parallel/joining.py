"""Joining batches: the documents of all ranks one behind another, each rank with as many tokens as it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.comm.agreement import in_step_sharing
from shardwise.comm.group import Fields, rank_array
from shardwise.errors import PropertyError
from shardwise.layout import Layout, Places
from shardwise.layout.geometry import Boxes
from shardwise.nn.context_parallel.batches import SEQUENCE, checked, has_sequence
from shardwise.nn.context_parallel.token_labels import IGNORED, INPUTS, with_token_values
from shardwise.ops.attention import Documents
from shardwise.tensor import ShardedTensor
from shardwise.tensor.frame import Frame, Parts
from shardwise.torch_private import pytree


def join_batches(batch: Any, group: ProcessGroup) -> Any:
    """One sequence of the documents of all ranks, of which each rank has its own. Every rank of the group calls it."""

    def work() -> tuple[tuple[list[Any], Any], Fields, tuple[int, str]]:
        packed = _packed(batch)
        begins = [0]
        if isinstance(packed, Mapping):
            packed = dict(sorted(with_token_values(packed).items()))  # in whatever order a rank gives them
            found = packed.pop("documents", None)
            begins = begins if found is None else list(Documents.of(found).by_sample(1)[0])
        leaves, structure = pytree.tree_flatten(packed)
        tensors = [checked(leaf) for leaf in leaves if has_sequence(leaf)]
        lengths = {tuple(one.shape[: SEQUENCE + 1]) for one in tensors}
        if len(lengths) != 1 or next(iter(lengths))[0] != 1:
            raise PropertyError(
                "the tensors of a packed batch have one sample, of all documents one behind another, and as many "
                f"tokens each; found {sorted(lengths)}"
            )
        fields: dict[str, object] = {"verb": "join", "structure": str(structure)}
        for number, one in enumerate(tensors):
            fields[f"tensor {number}"] = f"{one.dtype} on {one.device.type}, {list(one.shape[SEQUENCE + 1 :])}"
        return (leaves, structure), fields, (tensors[0].shape[SEQUENCE], ",".join(map(str, begins)))

    (leaves, structure), told = in_step_sharing(group, work)
    lengths = [int(length) for length, _ in told]
    starts = (np.cumsum(lengths) - lengths).tolist()
    made = [_joined(leaf, starts, lengths, group) if has_sequence(leaf) else leaf for leaf in leaves]
    result = pytree.tree_unflatten(made, structure)
    if isinstance(result, dict) and any(name in result for name in INPUTS):
        each = zip(starts, told, strict=True)
        result["documents"] = Documents.of(
            [start + int(begin) for start, (length, text) in each if length for begin in text.split(",")]
        )
    return result


def _joined(tensor: torch.Tensor, starts: Sequence[int], lengths: Sequence[int], group: ProcessGroup) -> ShardedTensor:
    rest = list(tensor.shape[SEQUENCE + 1 :])
    offsets = np.array([[0, start, *[0] * len(rest)] for start in starts], dtype=np.int64)
    sizes = np.array([[1, length, *rest] for length in lengths], dtype=np.int64)
    places = Places.on_ranks(rank_array(group), tensor.device.type)
    layout = Layout.of([1, sum(lengths), *rest], Boxes(offsets, sizes), places)
    frame = Frame.of(layout, None, layout.rows_on(dist.get_rank()), tensor.dtype, group)
    return ShardedTensor._wrap(Parts(frame, [tensor.clone(memory_format=torch.contiguous_format)]))


# Nested tensors ------------------------------------------------------------------------------------------------------


def _packed(batch: Any) -> Any:
    """A batch whose nested tensors, of documents of different lengths, are one sequence each."""
    leaves, structure = pytree.tree_flatten(batch)
    nested: list[Any] = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_nested]
    if not nested:
        return batch
    if any(one.layout != torch.jagged for one in nested):
        raise PropertyError("nested tensors of documents are jagged: make them with layout=torch.jagged")
    offsets = nested[0].offsets()
    if any(not torch.equal(one.offsets(), offsets) for one in nested[1:]):
        raise PropertyError("the nested tensors of a batch have documents of the same lengths")
    made = [one.values().unsqueeze(0) if isinstance(one, torch.Tensor) and one.is_nested else one for one in leaves]
    packed = pytree.tree_unflatten(made, structure)
    if isinstance(packed, Mapping) and any(name in packed for name in INPUTS):
        packed = _with_documents(dict(packed), offsets)
    return packed


def _with_documents(packed: dict[str, Any], offsets: torch.Tensor) -> dict[str, Any]:
    """Positions within each document; the first token of a document is not what the last one of another predicts."""
    lengths, length = offsets.diff(), int(offsets[-1])
    first = torch.repeat_interleave(offsets[:-1], lengths, output_size=length)
    packed.setdefault("position_ids", (torch.arange(length, device=offsets.device) - first).unsqueeze(0))
    labels = packed.get("labels")
    if isinstance(labels, torch.Tensor):
        packed["labels"] = labels.clone()
        packed["labels"][:, offsets[:-1][lengths > 0]] = IGNORED
    return packed
