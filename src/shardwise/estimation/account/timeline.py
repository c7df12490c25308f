"""When everything on some tapes happens: transfers go on beside kernels, and begin when all ranks have come to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.estimation.account.tape import Arrival, Kernel, Sending, Tape
from shardwise.estimation.devices.device import Device

COMPUTE, TRANSFER, WAIT = "compute", "transfer", "wait"


@dataclass(frozen=True, slots=True)
class TimedEntry:
    """Something that takes time."""

    lane: str
    entry: Kernel | Sending
    start: float
    end: float


@dataclass
class Timeline:
    """One rank's step."""

    tape: Tape
    device: Device
    times: list[float] = field(
        default_factory=list
    )  # when each entry of the tape is over, or begun if it is a transfer
    spans: list[TimedEntry] = field(default_factory=list)
    seconds: float = 0.0
    _position: int = 0
    _host: float = 0.0  # when the host is free
    _device: float = 0.0  # when the device is free
    _wire: float = 0.0  # when the wire is free
    _ends: list[float] = field(default_factory=list)  # of transfers

    @property
    def _is_asynchronous(self) -> bool:
        """Whether the host does not wait for kernels."""
        return self.device.kind != "cpu"

    def to_next_transfer(self) -> Sending | None:
        """Go on to the next transfer that begins, or to the end."""
        entries = self.tape.entries
        while self._position < len(entries):
            entry = entries[self._position]
            if isinstance(entry, Sending):
                return entry
            self._position += 1
            if isinstance(entry, Arrival):
                self._arrive(self._ends[entry.number], self.tape.sendings[entry.number])
            else:
                self._compute(entry)
            self.times.append(self._device)
        self.seconds = max(self._host, self._device, self._wire)
        return None

    def ready(self) -> float:
        """When the transfer that comes next could begin, if this rank were alone."""
        return max(self._device, self._host, self._wire)

    def transfer(self, start: float, seconds: float) -> None:
        """The transfer that comes next goes on from then, so long."""
        entry = self.tape.entries[self._position]
        assert isinstance(entry, Sending)
        self._position += 1
        self._wire = start + seconds
        self._ends.append(self._wire)
        self.spans.append(TimedEntry(TRANSFER, entry, start, self._wire))
        if not self._is_asynchronous:  # the cores that compute are those that send
            self.spans.append(TimedEntry(WAIT, entry, self._device, self._wire))
            self._host = self._device = self._wire
        self.times.append(self._device)

    def _compute(self, kernel: Kernel) -> None:
        self._host += kernel.calls * self.device.call
        start = max(self._device, self._host)
        self._device = start + kernel.seconds(self.device)
        if not self._is_asynchronous:
            self._host = self._device
        if self._device > start:
            self.spans.append(TimedEntry(COMPUTE, kernel, start, self._device))

    def _arrive(self, end: float, sending: Sending) -> None:
        if end > self._device:
            self.spans.append(TimedEntry(WAIT, sending, self._device, end))
        self._device = max(self._device, end)
        if not self._is_asynchronous:
            self._host = max(self._host, self._device)


def simulate(tapes: Sequence[Tape], devices: Sequence[Device]) -> list[Timeline]:
    """What happens when on each rank. Ranks that come to the same transfers wait for each other at each."""
    timelines = [Timeline(tape, device) for tape, device in zip(tapes, devices, strict=True)]
    if len({len(tape.sendings) for tape in tapes}) > 1:  # they take part in different ones
        for one in timelines:
            while (sending := one.to_next_transfer()) is not None:
                one.transfer(one.ready(), sending.seconds(one.device))
        return timelines
    while True:
        found = [one.to_next_transfer() for one in timelines]
        sendings = [sending for sending in found if sending is not None]
        if not sendings:
            return timelines
        start = max(one.ready() for one in timelines)
        pairs = zip(sendings, timelines, strict=True)
        seconds = max(sending.seconds(one.device) for sending, one in pairs)
        for one in timelines:
            one.transfer(start, seconds)
