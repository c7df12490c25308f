"""`Route`: rows of this rank on their way to the ranks that values name, and the answers on their way back.

Both are permutations of the rows of all ranks, so the backward of each is the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from shardwise.autograd.rows import exchanged_rows
from shardwise.comm.group import without_data
from shardwise.comm.transfer.by_value import RowCounts, exchange_numbers
from shardwise.layout.geometry import IntArray
from shardwise.ops.engine.recorder import depends_on_values
from shardwise.tensor import ShardedTensorBase


class Route:
    """Where the rows of this rank go. Every rank of a group makes one, and calls its methods.

    The rows lie in the order of the group's members.
    """

    def __init__(self, counts: RowCounts, verb: str) -> None:
        self._counts, self._verb = counts, verb

    @staticmethod
    def at_cuts(model: ShardedTensorBase, cuts: IntArray | torch.Tensor, rows: int, verb: str) -> Route:
        """That of rows which go to the next member of the model's group at each of these places."""
        depends_on_values()
        group = model._frame.process_group
        assert group is not None
        if without_data():  # the values are not there: say that each member gets as many
            even = tuple(np.diff(np.arange(group.size() + 1) * rows // group.size()).tolist())
            return Route(RowCounts(group, even, even, known=False), verb)
        counts = np.diff(np.asarray(cuts, dtype=np.int64), prepend=0, append=rows)
        numbers = torch.from_numpy(np.stack([np.zeros_like(counts), counts]))[..., None]
        (sent,), (came,) = exchange_numbers(group, numbers, f"the sizes of {verb}")
        return Route(RowCounts(group, sent, came), verb)

    def send(self, *tensors: torch.Tensor, records: bool = False) -> list[torch.Tensor]:
        """The rows from all members, in their order; ``records`` says whether any rank wants their gradient."""
        return _exchanged(self._counts, self._verb, tensors, records)

    def answer(self, *tensors: torch.Tensor, records: bool = False) -> list[torch.Tensor]:
        """For each row that this rank has sent, what the member that got it answers."""
        return _exchanged(self._counts.reverse(), self._verb, tensors, records)


def _exchanged(counts: RowCounts, verb: str, tensors: Sequence[torch.Tensor], records: bool) -> list[torch.Tensor]:
    rows = exchanged_rows(counts, verb, None, [_flat(tensor) for tensor in tensors], records=records)[1]
    return [_like(one, tensor) for one, tensor in zip(rows, tensors, strict=True)]


def _flat(rows: torch.Tensor) -> torch.Tensor:
    """Rows with one dim behind; complex numbers as pairs."""
    if rows.is_complex():
        rows = torch.view_as_real(rows.resolve_conj())
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


def _like(rows: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Rows with the dims of others."""
    if other.is_complex():
        return torch.view_as_complex(rows.reshape(len(rows), *other.shape[1:], 2))
    return rows.reshape(len(rows), *other.shape[1:])


def by_member(owners: torch.Tensor, members: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The order in which rows lie member by member, given the member of each, and where those of each next begin."""
    order = owners.argsort(stable=True)
    return order, torch.searchsorted(owners[order], torch.arange(1, members, device=owners.device))
