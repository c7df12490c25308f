"""`ExpertPlacement`: the ranks on which each expert of a layer lies, and the spec that puts parameters there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from shardwise.errors import PlanError
from shardwise.layout import Layout, Places
from shardwise.layout.geometry import Boxes
from shardwise.layout.specs import FixedShardingSpec
from shardwise.layout.specs.chunking import weighted_sizes
from shardwise.nn.experts.route import Holders
from shardwise.nn.plans.rank_rows import RankRows

MOST_SHOWN = 16  # ranks, in a table


@dataclass(frozen=True)
class ExpertPlacement:
    """For each expert the global ranks that have it: one, or several copies. A rank may have any number, or none."""

    holders: Holders

    @staticmethod
    def even(experts: int, rows: RankRows) -> ExpertPlacement:
        """Experts in order, in equal or weighted numbers for each rank of a row; each row has all of them."""
        numbers = weighted_sizes(experts, rows.weights or (1,) * len(rows))
        columns = [column for column, number in enumerate(numbers) for _ in range(number)]
        return ExpertPlacement(tuple(tuple(rows.ranks[:, column].tolist()) for column in columns))

    @staticmethod
    def parse(given: Sequence[int | Sequence[int]], experts: int, ranks: Sequence[int]) -> ExpertPlacement:
        """Of a list with a rank for each expert, or several; or the error that says what is wrong with it."""
        if not isinstance(given, Sequence):
            raise PlanError(f"a placement is a list with a rank for each expert, or several; found {given!r:.80}")
        if len(given) != experts:
            raise PlanError(
                f"a placement has ranks for each expert: found {len(given)}, and there are {experts} experts"
            )
        known = set(ranks)
        holders = []
        for expert, where in enumerate(given):
            some = _ranks_of(where)
            if some is None or not some or len(set(some)) < len(some) or not known.issuperset(some):
                raise PlanError(
                    f"expert {expert} lies on one rank of the process group, or on several different ones: found "
                    f"{where!r:.80}, and the group has {list(ranks)!s:.80}"
                )
            holders.append(tuple(sorted(some)))
        return ExpertPlacement(tuple(holders))

    def spec(self, parameter: torch.Tensor, device_type: str) -> FixedShardingSpec:
        """The spec of a parameter with the experts along its first dim: a box for neighbours on the same ranks."""
        boxes: list[tuple[int, int]] = []
        ranks: list[int] = []
        begin = 0
        for holders, run in groupby(self.holders):
            end = begin + len(list(run))
            boxes += [(begin, end)] * len(holders)
            ranks += holders
            begin = end
        size = np.array(parameter.shape, dtype=np.int64)
        offsets, sizes = np.zeros((len(boxes), len(size)), dtype=np.int64), np.tile(size, (len(boxes), 1))
        offsets[:, 0], sizes[:, 0] = [one for one, _ in boxes], [end - one for one, end in boxes]
        places = Places.on_ranks(np.array(ranks, dtype=np.int64), device_type)
        return FixedShardingSpec.of(Layout.of(tuple(parameter.shape), Boxes(offsets, sizes), places))

    def spec_of_one(self, expert: int, parameter: torch.Tensor, device_type: str) -> FixedShardingSpec:
        """The spec of a parameter of one expert: whole on each rank of this expert."""
        places = Places.on_ranks(np.array(self.holders[expert], dtype=np.int64), device_type)
        return FixedShardingSpec.of(Layout.whole(tuple(parameter.shape), places))

    def by_rank(self, ranks: Sequence[int]) -> dict[int, list[int]]:
        """The experts of each rank."""
        return {rank: [expert for expert, where in enumerate(self.holders) if rank in where] for rank in ranks}

    def describe(self, ranks: Sequence[int]) -> str:
        """Numbers of experts on each rank, and how many experts have copies."""
        numbers = [len(experts) for experts in self.by_rank(ranks).values()]
        text = " | ".join(map(str, numbers[:MOST_SHOWN])) + " | …" * (len(numbers) > MOST_SHOWN)
        copied = sum(len(where) > 1 for where in self.holders)
        return f"experts {text}" + f", {copied} with copies" * bool(copied)


def _ranks_of(where: Any) -> tuple[int, ...] | None:
    """One rank or several, as a tuple; None of anything else."""
    some = (where,) if isinstance(where, int) else where
    if isinstance(some, str) or not isinstance(some, Sequence):
        return None
    return tuple(some) if all(isinstance(one, int) and not isinstance(one, bool) for one in some) else None
