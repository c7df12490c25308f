"""Sending what a plan says in one exchange of messages, which lie where they lie, or are packed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from shardwise.process_group import rank_array
from shardwise.transfer.carrier import Carrier
from shardwise.transfer.exchange import Ready, UnderWay, exchanged, failing_together
from shardwise.transfer.pieces import Ordered
from shardwise.transfer.plan import Plan
from shardwise.transfer.sums import write_sum
from shardwise.transfer.views import Piece, copy, source_views, target_views


class AllToAll(Carrier):
    """A transfer in which every rank of the group takes part, in one exchange of messages."""

    def __init__(
        self,
        plan: Plan,
        tensors: Sequence[torch.Tensor],
        outs: list[torch.Tensor],
        group: ProcessGroup,
        dtype: torch.dtype,
        ready: Ready,
        *,
        owned: bool,
    ) -> None:
        """With ``owned``, nobody else has the destination: messages may be received straight into it."""
        super().__init__(plan, outs, group, dtype)
        members = rank_array(group)
        out_going, in_coming = (side(self._rank).ordered(members) for side in (plan.sends, plan.receives))
        sources = source_views(out_going.pieces, plan, tensors)
        self._targets = target_views(in_coming.pieces, plan, outs)
        self._alike = in_coming.pieces.meetings if plan.sums else None
        given = self._given(out_going, sources)
        here, there = (side.run_of(self._rank) for side in (out_going, in_coming))
        own = sources[here]
        # What lies apart is added up slowly: it is packed among what arrives.
        apart = plan.sums and not all(piece.view.is_contiguous() for piece in own)
        # What the caller owns is not received into: after an error, messages that are late might still come.
        taken = self._taken(in_coming, straight=owned and not plan.sums, with_own=apart)
        tag = ready()
        self._way: UnderWay | None = self._begin(given, taken, tag)
        # Our own pieces are not sent, which would only copy them.
        self._own = (slice(0), []) if apart else (there, own)
        if apart:
            place = next(buffer for run, buffer in self._arrived if run == there)
            self._pack(place, own)
        elif not plan.sums:
            for target, source in zip(self._targets[there], own, strict=True):
                copy(target.view, source.view)

    def _begin(self, given: list[torch.Tensor], taken: list[torch.Tensor], tag: int) -> UnderWay:
        return exchanged(self._group, given, taken, tag)

    def _given(self, side: Ordered, sources: list[Piece]) -> list[torch.Tensor]:
        """The message to each rank: as it lies if it may, else packed; what several ranks get is packed once."""
        given, mine = [self._empty(0)] * len(side.members), side.number_of(self._rank)
        packed: dict[int, torch.Tensor] = {}
        for (number, run), first in zip(side.runs, side.alike, strict=True):
            if number == mine:
                continue
            if first not in packed:
                straight = self._straight(sources[run])
                packed[first] = self._packed(sources[run]) if straight is None else straight
            given[number] = packed[first]
        return given

    def _taken(self, side: Ordered, *, straight: bool, with_own: bool) -> list[torch.Tensor]:
        """Where the message of each rank goes: into its place if it lies there whole, else into a buffer.

        The buffers lie one behind another, if asked for with room for this rank's own pieces among them.
        """
        taken, mine = [self._empty(0)] * len(side.members), side.number_of(self._rank)
        far = []
        for number, run in side.runs:
            if number == mine and not with_own:
                continue
            place = self._straight(self._targets[run]) if straight else None
            if place is None:
                far.append((number, run))
            else:
                taken[number] = place
        counts = [side.counts[number] for number, _ in far]
        buffers = self._empty(sum(counts)).split_with_sizes(counts) if counts else ()
        self._arrived: list[tuple[slice, torch.Tensor]] = []
        for (number, run), buffer in zip(far, buffers, strict=True):
            self._arrived.append((run, buffer))
            if number != mine:
                taken[number] = buffer
        return taken

    def _straight(self, pieces: Sequence[Piece]) -> torch.Tensor | None:
        """The memory of the one piece, if it can go as it lies."""
        return pieces[0].view.view(-1) if len(pieces) == 1 and self._fits(pieces[0].view) else None

    def wait(self) -> list[torch.Tensor]:
        """Finish: unpack what has arrived, unless it arrived in its place, or add it up."""
        if self._way is None:
            return self.outs
        self._way.wait()
        self._way = None
        with torch.no_grad(), failing_together(self._group):
            if self._plan.sums:
                self._add_up()
            else:
                for run, buffer in self._arrived:
                    self._unpack(buffer, self._targets[run])
        self._arrived, self._targets, self._own = [], [], (slice(0), [])
        return self.outs

    def _add_up(self) -> None:
        """Write the sums of what has come for each part of the destination, in order of the ranks."""
        parts = [piece.view for piece in self._targets]  # each replaced by what has come for it
        own, sources = self._own
        parts[own] = [piece.view for piece in sources]
        for run, buffer in self._arrived:
            pieces = self._targets[run]
            came = buffer.split_with_sizes([piece.count for piece in pieces])
            parts[run] = [part.view(piece.view.shape) for part, piece in zip(came, pieces, strict=True)]
        alike = self._alike or []
        if sum(self._targets[numbers[0]].count for numbers in alike) != sum(out.numel() for out in self.outs):
            for out in self.outs:
                out.zero_()
        for numbers in alike:
            write_sum(self._targets[numbers[0]].view, [parts[number] for number in numbers])
        if self._alike is None:
            for piece, part in zip(self._targets, parts, strict=True):
                piece.view.add_(part.to(piece.view.device))
