"""`explain`: what a call would move, computed on this rank alone and without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.comm.tracing.events import MEETING, Collective, Origin
from shardwise.comm.tracing.origin import place_of
from shardwise.comm.tracing.record import Trace, recording
from shardwise.comm.tracing.table import show
from shardwise.estimation.without_data.stand_ins import StandIns, no_grad_for_inference, restoring_state, taking_lists
from shardwise.layout.pictures.words import bytes_text
from shardwise.torch_private import FAKE_TENSOR_ERRORS, FakeTensorMode

GATHERS = 3  # of the weights in a step of fully sharded training: for both passes, and back as gradients


class Explanation(Trace):
    """The transfers of a call that was not run; printed, a table.

    ``events`` are the transfers in order, ``meetings`` the small messages by which ranks would agree or add up small
    results. Their numbers are those in the order of both. ``stopped`` says where the call came to something that
    depends on values, after which nothing is known; else it is empty.
    """

    is_forecast = True

    def __init__(self) -> None:
        super().__init__()
        self.meetings: list[Collective] = []
        self.stopped = ""

    def add(self, origin: Origin, **said: Any) -> None:
        """One more transfer, or one more meeting."""
        found = self.meetings if said["kind"] == MEETING else self.events
        number = len(self.events) + len(self.meetings) + 1
        found.append(Collective(number, origin.op, origin.place, origin.module, **said))

    @property
    def sent(self) -> int:
        """Bytes that this rank would send, without meetings."""
        return sum(one.sent for one in self.events)

    @property
    def received(self) -> int:
        """Bytes that this rank would receive, without meetings."""
        return sum(one.received for one in self.events)

    @property
    def in_all(self) -> int:
        """Bytes that all ranks would send, without meetings."""
        return sum(one.in_all or 0 for one in self.events)

    def __str__(self) -> str:
        events = sorted([*self.events, *self.meetings], key=lambda one: one.number)
        shown = show(events, f"rank {self.rank} of {self.ranks}", times=False)
        return "\n\n".join(filter(None, (shown, self._advice(), self.stopped)))

    def _advice(self) -> str:
        """Which modules send more than it would take to gather their weights, if any do."""
        sent: dict[str, int] = {}
        for one in self.events:
            sent[one.module] = sent.get(one.module, 0) + (one.in_all or 0)
        weights, gathers = self._origins.weights, GATHERS * (self.ranks - 1)
        found = [name for name in sent if weights.get(name) and sent[name] > gathers * weights[name]]
        if not found:
            return ""
        most = max(found, key=lambda name: sent[name] - gathers * weights[name])
        what = f"'{most}' sends" if len(found) == 1 else f"{len(found)} modules, '{most}' most of all, send"
        sizes = f"{bytes_text(sent[most])} against {bytes_text(gathers * weights[most])}"
        return (
            f"{what} more than it would take to gather the weights:\n  {sizes} in a step.\n"
            "  With samples of its own on each rank, shardwise.fully_shard gathers weights instead."
        )

    def __repr__(self) -> str:
        return f"<Explanation of rank {self.rank}: {len(self.events)} transfers, {self.in_all:,} bytes by all>"


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """What ``function(*args, **kwargs)`` would move: each transfer, its op and line, its bytes and the least possible.

    This rank alone works it out, by calling the function on tensors without data: nobody is asked, nothing is sent, and
    no memory is needed. The function, its arguments, and the modules, optimizers and tensors that it refers to are
    copied first, without data, so that nothing is changed by it::

        >>> x = shardwise.shard(torch.ones(4, 4), 0)
        >>> told = shardwise.explain(lambda: x.redistribute(1))  # print(told) is a table
        >>> [event.sent for event in told.events]  # bytes, by this rank
        [16]

    Where values decide what happens, such as a loop that ends when a loss is small, the explanation stops and says so.
    Meetings, in which ranks agree or add up small results, are counted apart from the transfers. What is "at least"
    sent is the least for these layouts: other layouts may need less.
    """
    mode, explanation = FakeTensorMode(allow_non_fake_inputs=True), Explanation()
    stand_ins = StandIns(mode)
    with restoring_state(), no_grad_for_inference():
        call, positional, named = stand_ins.of(function), stand_ins.of(args), stand_ins.of(kwargs)
        with mode, taking_lists(), recording(explanation):
            try:
                call(*positional, **named)
            except FAKE_TENSOR_ERRORS as error:
                explanation.stopped = stopped_text(error)
    return explanation


def stopped_text(error: BaseException) -> str:
    """Where values decided what comes next."""
    place = place_of(error.__traceback__)
    op = getattr(error, "func", None)
    what = f"{op} depends on values" if op is not None else f"something depends on values ({error})"
    return f"stopped{f' at {place}' if place else ''}: {what}, which are not there; what comes after it is not told"
