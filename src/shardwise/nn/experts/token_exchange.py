"""`TokenExchange`: rows of tokens on their way to the entries of experts, and rows of entries back, under autograd.

To send is to give each rank the rows of its tokens, and there each entry its row. To give back is to add up the entries
of each row, to send the sums, and to add up those of each token. Each is the other's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.autograd.anchors import anchor_gradient, input_anchor, output_anchor
from shardwise.autograd.buckets import compare_if_strict
from shardwise.autograd.recorded_backward import register_anchor, sendable
from shardwise.comm.transfer.by_value import RowCounts, exchange_rows
from shardwise.nn.experts.entries import Entries

Kind = tuple[torch.Size, torch.dtype, torch.device]


@dataclass(frozen=True, eq=False)
class Arrived:
    """The entries of this rank, which read the rows that have come."""

    entries: Entries
    place: torch.Tensor  # of the choice of each entry, among those of all rows; one column
    expert: torch.Tensor  # of each entry, by its number on this rank; one column


class TokenExchange:
    """The way of rows between the tokens of this rank and the entries of experts on all ranks.

    A tensor has a row for each token and each entry; or one element for each choice of a token, and each entry.
    """

    def __init__(
        self, counts: RowCounts, tokens: Entries, codes: torch.Tensor, arrive: Callable[[torch.Tensor], Arrived]
    ) -> None:
        """``tokens`` are the rows that are sent, each of which reads a token.

        ``codes``, one for each choice of a token, travel with the first rows; ``arrive`` makes entries of those that
        have come.
        """
        self.counts, self._tokens, self._codes, self._arrive = counts, tokens, codes, arrive
        self._arrived: Arrived | None = None

    @property
    def arrived(self) -> Arrived:
        """The entries of this rank, known once tokens were sent."""
        assert self._arrived is not None, "tokens are sent first"
        return self._arrived

    def send(self, tensors: Sequence[torch.Tensor], verb: str) -> list[torch.Tensor]:
        """The rows of tokens that have come to this rank."""
        given = [*tensors, self._codes] if self._arrived is None else tensors
        came = exchange_rows(self.counts, given, verb, index=self._tokens.row)
        if self._arrived is None:
            self._arrived = self._arrive(came.pop())
        return came

    def for_entries(self, rows: torch.Tensor, *, of_choices: bool) -> torch.Tensor:
        """What each entry here has of rows that have come."""
        return torch.take(rows, self.arrived.place) if of_choices else self.arrived.entries.spread(rows)

    def give_back(self, tensors: Sequence[torch.Tensor], of_choices: Sequence[bool], verb: str) -> list[torch.Tensor]:
        """What entries have, added up for each row, and sent back to where the rows came from."""
        add_up = self.arrived.entries.add_up
        each = zip(tensors, of_choices, strict=True)
        sums = [self._by_choice(one) if of_choice else add_up(one) for one, of_choice in each]
        return exchange_rows(self.counts.reverse(), sums, verb)

    def for_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """What has come back, added up for each token of this rank."""
        return self._tokens.add_up(rows)

    def _by_choice(self, values: torch.Tensor) -> torch.Tensor:
        """What entries have as one element for each choice of a row, zero for those that have no entry here."""
        rows, choices = self.arrived.entries.rows, self._codes.shape[1]
        made = torch.zeros(rows * choices, dtype=values.dtype, device=values.device)
        return made.scatter_(0, self.arrived.place.view(-1), values.view(-1)).view(rows, choices)


@dataclass(frozen=True, eq=False)
class Movement:
    """One movement of tensors along an exchange, and its name in errors and traces."""

    exchange: TokenExchange
    is_back: bool
    of_choices: tuple[bool, ...]  # for each tensor
    has_grad: tuple[bool, ...]
    verb: str

    def begin(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The rows that other ranks have sent. Every rank of the group calls it."""
        if self.is_back:
            return self.exchange.give_back(tensors, self.of_choices, self.verb)
        return self.exchange.send(tensors, self.verb)

    def finish(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """What comes of these rows here, which are those of one of the tensors."""
        if self.is_back:
            return self.exchange.for_tokens(rows)
        return self.exchange.for_entries(rows, of_choices=self.of_choices[number])

    def move(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Both, of all tensors."""
        return [self.finish(number, rows) for number, rows in enumerate(self.begin(tensors))]

    def gradient(self) -> Movement:
        """That of the gradients."""
        of_choices = tuple(one for one, has_grad in zip(self.of_choices, self.has_grad, strict=True) if has_grad)
        has_grad, verb = (True,) * len(of_choices), f"the gradient of {self.verb}"
        return replace(self, is_back=not self.is_back, of_choices=of_choices, has_grad=has_grad, verb=verb)


class _Moved(torch.autograd.Function):
    """What comes of tensors in a movement."""

    @staticmethod
    def forward(ctx: Any, movement: Movement, anchor: torch.Tensor | None, *tensors: torch.Tensor) -> Any:
        """An anchor, then what came."""
        outs = movement.move(tensors)
        each = list(zip(outs, movement.has_grad, strict=True))
        ctx.mark_non_differentiable(*(out for out, has_grad in each if not has_grad))
        ctx.set_materialize_grads(False)
        ctx.movement, ctx.kinds = movement, [(out.shape, out.dtype, out.device) for out, has_grad in each if has_grad]
        return output_anchor(ctx, anchor, tensors), *outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """The gradients, moved the other way."""
        back, has_grad = ctx.movement.gradient(), ctx.movement.has_grad
        given = [grad for grad, one in zip(grads[1:], has_grad, strict=True) if one]
        anchor, *parts = sendable([grads[0], *_defined(given, ctx.kinds)], ctx)
        of = [(part.shape[1], part.dtype) for part in parts]
        compare_if_strict(back.exchange.counts.group, {"verb": back.verb, "of": of})
        came: Iterable[torch.Tensor | None]
        if torch.is_grad_enabled():
            anchor, *came = _moved(back, anchor, *parts)
            register_anchor(anchor)
        else:
            wanted = [one for one, has_one in zip(ctx.needs_input_grad[2:], has_grad, strict=True) if has_one]
            each = enumerate(zip(back.begin(parts), wanted, strict=True))
            came = [back.finish(number, rows) if one else None for number, (rows, one) in each]
        left = iter(came)
        return None, anchor_gradient(ctx, 1, anchor), *(next(left) if one else None for one in has_grad)


_moved: Callable[..., tuple[torch.Tensor, ...]] = _Moved.apply  # which torch declares without types


def _defined(grads: Sequence[torch.Tensor | None], kinds: Sequence[Kind]) -> list[torch.Tensor]:
    """The gradients, zeros for what nobody has read."""
    return [
        torch.zeros(size, dtype=dtype, device=device) if grad is None else grad
        for grad, (size, dtype, device) in zip(grads, kinds, strict=True)
    ]


def moved(
    movement: Movement, anchor: torch.Tensor | None, tensors: Sequence[torch.Tensor], *, records: bool
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """An anchor, if recorded, and what came. Every rank of the group calls it, and records alike."""
    if not records:
        with torch.no_grad():
            return None, movement.move(tensors)
    made, *outs = _moved(movement, input_anchor(anchor, tensors, tensors[0].device), *tensors)
    return made, outs
