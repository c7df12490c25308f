"""`Dispatch`: the tokens of this rank on their way to the experts that they have chosen, and back.

A token goes once to each rank that has experts of its choice, with the weights of its choices and the experts' numbers.
The weighted sum of their results comes back as one row. The sizes of all results follow from one exchange of numbers,
for which the host waits once; on an accelerator it waits for nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from shardwise.autograd.anchors import tie
from shardwise.autograd.rows import Entries
from shardwise.comm.group import without_data
from shardwise.comm.tracing import record
from shardwise.comm.transfer.by_value import RowCounts
from shardwise.nn.experts.route import ExpertRoute
from shardwise.ops.engine.routes import Route

OUT, BACK = "tokens on their way to experts", "the results of experts"


@dataclass(frozen=True, eq=False)
class Received:
    """What has come for the experts of this rank: one entry for each choice of a token, expert by expert."""

    rows: list[torch.Tensor]  # for each tensor that tokens bring
    expert: torch.Tensor  # of each entry, by its number on this rank
    weight: torch.Tensor | None
    entries: Entries  # which row each belongs to
    anchor: torch.Tensor | None


class Dispatch:
    """The way of tokens to experts and back. Every rank of the group makes one, and calls both methods."""

    def __init__(
        self, route: ExpertRoute, index: torch.Tensor, group: ProcessGroup, tokens: Callable[[], Sequence[int]]
    ) -> None:
        """Of choices by token; ``tokens`` gives how many tokens each member has, where they have no values."""
        self._choices = index.shape[1]
        count, choices = index.shape
        without_values = record.is_forecast() or without_data()
        token = torch.arange(count, device=index.device)[:, None].expand(count, choices).reshape(-1)
        member, local = (one.reshape(-1) for one in ((index, index) if without_values else route.targets(index)))
        # Choices by member and token: those of one token for one member share a row.
        key, order = torch.sort(member * max(count, 1) + token, stable=True)
        is_first = torch.ones_like(key)
        is_first[1:] = key[1:] != key[:-1]
        row = is_first.cumsum(0) - 1
        if without_values:
            size = 16 * (route.members - 1)
            with record.waiting("meeting", size, size, in_all=size * route.members):
                """Of the numbers."""
            counts, self._pairs = _assumed(route, group, tokens(), choices)
            self._route = Route(counts, OUT, BACK)
        else:
            numbers = torch.zeros(route.members, 2, dtype=torch.int64, device=index.device)
            both = torch.stack([is_first, torch.ones_like(is_first)], 1)
            numbers.scatter_add_(0, member[order][:, None].expand(-1, 2), both)
            self._route, (pairs,) = Route.of(group, numbers, OUT, BACK)
            self._pairs = sum(pairs)
        rows = self._route.rows
        of_row = torch.zeros_like(token).scatter_(0, row, token[order])[:rows]
        self._tokens = Entries(of_row, count)
        numbers_there = torch.full((len(token), choices), -1, dtype=torch.int32, device=index.device)
        numbers_there[row, order % choices] = local[order].int()
        self._numbers_there = numbers_there[:rows]

    def send(
        self,
        tokens: Sequence[torch.Tensor],
        weights: torch.Tensor | None,
        anchor: torch.Tensor | None,
        *,
        records: bool,
    ) -> Received:
        """Send tokens, of one or several tensors, to their experts; what comes for the experts here.

        The weights are those of each choice, if these travel.
        """
        of_choices = [] if weights is None else [self._tokens.spread(weights)]
        given = [*map(self._tokens.spread, tokens), *of_choices, self._numbers_there]
        made, came = self._route.send_anchored(anchor, given, records=records)
        rows, numbers = came[: len(tokens)], came[-1]
        here = numbers.reshape(-1).long()
        here = torch.where(here < 0, torch.iinfo(torch.int32).max, here)
        expert, order = torch.sort(here, stable=True)
        order = order[: self._pairs]
        entries = Entries(order // self._choices, len(numbers))
        weight = None if weights is None else came[-2].reshape(-1).index_select(0, order)
        return Received([*map(entries.spread, rows)], expert[: self._pairs], weight, entries, made)

    def give_back(
        self, results: torch.Tensor, received: Received, anchors: Sequence[torch.Tensor], *, records: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Send the weighted results of the experts here back; the sum for each token of this rank, and an anchor."""
        rows = received.entries.add_up(results)
        known = [*anchors] if received.anchor is None else [*anchors, received.anchor]
        anchor = tie(known) if records and known else None
        made, (came,) = self._route.answer_anchored(anchor, [rows], records=records)
        return self._tokens.add_up(came), made


def _assumed(route: ExpertRoute, group: ProcessGroup, tokens: Sequence[int], choices: int) -> tuple[RowCounts, int]:
    """What travels if tokens choose all experts alike, where there are no values to decide it."""
    experts = len(route.copies)
    shares = [sum(1 / route.copies[expert] for expert in own) for own in route.experts]
    misses = [math.prod(max(experts - share - k, 0) / (experts - k) for k in range(choices)) for share in shares]

    def rows(sender: int, receiver: int) -> int:
        return int(tokens[sender] * (1 - misses[receiver]))

    sent, came = zip(
        *((rows(route.here, other), rows(other, route.here)) for other in range(route.members)), strict=True
    )
    pairs = min(sum(tokens) * choices * shares[route.here] / experts, sum(came) * choices)
    return RowCounts(group, sent, came, known=False), int(pairs)
