"""`Dispatch`: the tokens of this rank on their way to the experts that they have chosen, and back.

A token goes once to each rank that has experts of its choice, with the weights of its choices and the experts' numbers.
The weighted sum of their results comes back as one row. The sizes of all results follow from one exchange of numbers,
for which the host waits once; on an accelerator it waits for nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed import ProcessGroup

from shardwise.autograd.anchors import tie
from shardwise.comm.group import is_fake, without_data
from shardwise.comm.tracing import record
from shardwise.comm.transfer.by_value import RowCounts, exchange_numbers
from shardwise.nn.experts.entries import Entries, counting, is_first, where_true
from shardwise.nn.experts.route import ExpertRoute
from shardwise.nn.experts.token_exchange import Arrived, Movement, TokenExchange, moved

OUT, BACK = "tokens on their way to experts", "the results of experts"


@dataclass(frozen=True, eq=False)
class Received:
    """What has come for the experts of this rank: one entry for each choice of a token."""

    rows: list[torch.Tensor]  # for each tensor that tokens bring
    expert: torch.Tensor  # of each entry, by its number on this rank; one column
    weight: torch.Tensor | None  # one column
    anchor: torch.Tensor | None


class Dispatch:
    """The way of tokens to experts and back. Every rank of the group makes one, and calls both methods."""

    def __init__(
        self,
        route: ExpertRoute,
        index: torch.Tensor,
        group: ProcessGroup,
        tokens: Callable[[], Sequence[int]],
        *,
        by_expert: bool = False,
    ) -> None:
        """Of choices by token, contiguous; ``tokens`` gives how many tokens each member has, where they have no values.

        With ``by_expert``, tokens arrive expert by expert, else as they were sent.
        """
        count, choices = index.shape
        without_values = record.is_forecast() or without_data()
        second, code = (index.view(-1), index.int()) if without_values else route.targets(index)
        # The choices of one token for one member share a row: that of the first of them.
        first = is_first(second, choices) if choices > 1 or without_values else None
        if without_values:
            size = 16 * (route.members - 1)
            with record.waiting("meeting", size, size, in_all=size * route.members):
                """Of the numbers."""
            counts, pairs = _assumed(route, group, tokens(), choices)
        else:
            counts, pairs = _counted(route, second, first, group)
        if first is None:
            token = counting(count, index.device)
        else:
            place = where_true(first, sum(counts.sent)).view(-1)
            token, second = place // choices, second.index_select(0, place)
        # Row by row, tokens ascend; members want their rows together.
        order = torch.sort(second, stable=True)[1]
        rows = Entries(count, token, order)
        self._exchange = TokenExchange(
            counts, rows, code.view(count, choices), partial(_arrived, route, group, pairs, by_expert)
        )

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
        tensors = [*tokens] if weights is None else [*tokens, weights]
        of_choices = (False,) * len(tokens) if weights is None else (*(False,) * len(tokens), True)
        has_grad = tuple(one.is_floating_point() or one.is_complex() for one in tensors)
        movement = Movement(self._exchange, is_back=False, of_choices=of_choices, has_grad=has_grad, verb=OUT)
        made, came = moved(movement, anchor, tensors, records=records)
        return Received(came[: len(tokens)], self._exchange.arrived.expert, None if weights is None else came[-1], made)

    def give_back(
        self, results: torch.Tensor, received: Received, anchors: Sequence[torch.Tensor], *, records: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Send the weighted results of the experts here back; the sum for each token of this rank, and an anchor."""
        known = [*anchors] if received.anchor is None else [*anchors, received.anchor]
        anchor = None if not records or not known else known[0] if len(known) == 1 else tie(known)
        movement = Movement(self._exchange, is_back=True, of_choices=(False,), has_grad=(True,), verb=BACK)
        made, (came,) = moved(movement, anchor, [results], records=records)
        return came, made


def _counted(
    route: ExpertRoute, second: torch.Tensor, first: torch.Tensor | None, group: ProcessGroup
) -> tuple[RowCounts, int]:
    """How many rows this rank sends and gets, and how many choices come with them. Every rank of the group calls it."""
    numbers = torch.zeros(2, route.members, 2, dtype=torch.int64, device=second.device)
    place = second - 1 if first is None else torch.add(second, first, alpha=-1)
    numbers[1].view(-1).scatter_(0, place, 1, reduce="add")  # for each member the rows, and the choices beyond these
    (sent, _), (came, more) = exchange_numbers(group, numbers, f"the sizes of {OUT}")
    return RowCounts(group, sent, came), sum(came) + sum(more)


def _arrived(route: ExpertRoute, group: ProcessGroup, pairs: int, by_expert: bool, code: torch.Tensor) -> Arrived:
    """The entries of codes that have come with their rows."""
    rows, choices = code.shape
    if is_fake(group):  # nobody has sent any: let all tokens have chosen the first expert here
        code = torch.full_like(code, route.here << route.number_bits)
    number, is_here = route.experts_here(code)
    place = where_true(is_here.view(-1), pairs)
    row, order = place.view(-1), None
    expert = torch.take(number, place)
    if by_expert:
        expert, sorted_order = torch.sort(expert, dim=0, stable=True)
        order = sorted_order.view(-1)
        place = place.index_select(0, order)
    return Arrived(Entries(rows, row if choices == 1 else row // choices, order), place, expert)


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
