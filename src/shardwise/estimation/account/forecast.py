"""`Forecast`: the trace of a step without data, which goes onto a tape with the time that each transfer would take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise.comm.tracing.events import MEETING, Origin
from shardwise.comm.tracing.origin import Origins, caller
from shardwise.comm.tracing.record import Trace
from shardwise.estimation.account.tape import Arrival, Kernel, Sending, Tape
from shardwise.estimation.devices.device import Device
from shardwise.torch_private import current_backward, current_node, next_node_number

SHARDED = 2.5  # host time of a call on sharded tensors besides its kernels, in calls of an op


class _Origins(Origins):
    """Also knows which call of a plain op each node of autograd is of."""

    def __init__(self, begin_call: Callable[[], None]) -> None:
        super().__init__()
        self._begin_call, self._seen = begin_call, 0

    def enter(self, op: Any) -> tuple[Origin, int]:
        """An op on sharded tensors begins."""
        if not self._running.ops:
            self._begin_call()
        return super().enter(op)

    def here_cheaply(self) -> Origin:
        """What is being computed, as `here`; outside of ops on sharded tensors with the module and the line alone."""
        running, task = self._running, current_backward()
        if running.ops and running.ops[-1][1] == task:
            return running.ops[-1][0]
        node = current_node() if task != -1 else None
        if node is not None and not (torch.is_grad_enabled() and running.modules):
            found = self._nodes.get(node._sequence_nr())
            return Origin("backward", "", "") if found is None else found
        origin = Origin("", caller().place, self._module())
        last = next_node_number()
        if torch.is_grad_enabled():
            for number in range(max(self._seen, last - 8), last):
                self._nodes.setdefault(number, origin)
        self._seen = last
        return origin


class Forecast(Trace):
    """What is sent in a step without data; all of it goes onto a tape."""

    is_forecast = foresees_programs = True

    def __init__(self, device: Device, tape: Tape, is_buffer: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.foreseen, self.tape, self._is_buffer = device.kind, tape, is_buffer
        self.machines: Sequence[int] = ()  # of each rank
        self.meetings = 0
        self.is_setting_up = False  # whether a step is being set up
        self._origins = _Origins(self._begin_call)

    def here(self) -> Origin:
        """What is being computed."""
        return self._origins.here_cheaply()  # type: ignore[attr-defined,no-any-return] # made above

    def is_in_module(self) -> bool:
        """Whether a module is running within another one."""
        return len(self._origins._running.modules) > 1

    @property
    def sets_up(self) -> bool:  # type: ignore[override] # it changes
        """Whether no step has begun. What a module sends is of a step: units are tried in the first one."""
        return self.is_setting_up and not self._origins._running.modules

    def count(self) -> int:
        """How many transfers there were."""
        return len(self.tape.sendings)

    def restart(self, tape: Tape) -> None:
        """From now on, a new step, which goes onto this tape."""
        self.tape = tape
        self.events.clear()
        self.ops.clear()
        self.meetings = 0

    def add(self, origin: Origin, **said: Any) -> None:
        """A transfer has arrived: what is said was noted when it began."""

    def buffer(self, tensor: torch.Tensor) -> None:
        """A tensor is memory of a transfer."""
        self._is_buffer(tensor)

    def begin(self, said: dict[str, Any]) -> Under | None:  # type: ignore[override] # it has the same methods
        """A transfer begins."""
        if said["kind"] == MEETING:
            self.meetings += 1
            return None
        origin, to = self._origins.here(), said.get("to") or {}
        sizes, network = (said["sent"], said["received"]), self._over_network(said["kind"], to)
        sending = Sending(origin.op, origin.module, origin.place, said["kind"], *sizes, to, network)
        return Under(self.tape, self.tape.send(sending))

    def _over_network(self, kind: str, to: Mapping[int, int]) -> int:
        """Bytes for other machines. In a collective, all ranks of a machine pass on what others need, each a part."""
        here = self.machines[self.rank] if self.machines else 0
        away = sum(size for rank, size in to.items() if self.machines and self.machines[rank] != here)
        if not away or kind == "exchange":
            return away
        near = 1 + sum(self.machines[rank] == here for rank in to)
        return sum(to.values()) // near

    def _begin_call(self) -> None:
        self.tape.entries.append(Kernel("sharded call", self._origins._module(), "", SHARDED))


class Under:
    """A transfer under way, on the tape."""

    def __init__(self, tape: Tape, number: int) -> None:
        self._tape, self._number, self._has_arrived = tape, number, False

    def waits(self) -> None:
        """What was sent for is needed now."""
        if not self._has_arrived:
            self._tape.entries.append(Arrival(self._number))
        self._has_arrived = True

    def end(self) -> None:
        """It is there."""
        self.waits()
