"""`RankEstimate`: what a step needs on one rank, or on several that are alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property

from shardwise import report
from shardwise.errors import ProcessGroupError
from shardwise.estimation.account.accounting import Accounting
from shardwise.estimation.account.ledger import BACKWARD, STEP
from shardwise.estimation.account.tape import Kernel, Sending
from shardwise.estimation.account.timeline import COMPUTE, WAIT, Timeline
from shardwise.estimation.devices.device import Device
from shardwise.estimation.without_data.as_rank import shifted
from shardwise.layout.pictures.words import bytes_text, count_text, numbered


class RankEstimate:
    """The account of one rank, which holds for all ``ranks``."""

    def __init__(
        self, ranks: Sequence[int], device: Device, rank: int, accounting: Accounting, timeline: Timeline
    ) -> None:
        self.ranks, self.device, self._rank = ranks, device, rank
        self._ledger, self._tape, self._positions = accounting.ledger, accounting.tape, accounting.positions
        self._timeline, self.meetings = timeline, accounting.trace.meetings
        self._kinds = {
            name: type(module).__name__
            for model in accounting.models.values()
            for name, module in model.named_modules()
        }

    # Memory ----------------------------------------------------------------------------------------------------------

    @property
    def peak(self) -> int:
        """The most bytes that are there at once, with those that the device's runtime holds."""
        return self._ledger.peak + self.device.reserved

    @property
    def start(self) -> int:
        """The bytes that are there when the step begins."""
        return self._ledger.start + self.device.reserved

    @cached_property
    def at_peak(self) -> dict[str, int]:
        """By category, the bytes that are there at the peak."""
        return self._ledger.at(self._ledger.peak_event)

    @cached_property
    def alive(self) -> list[report.Alive]:
        """What is there at the peak, by category, module and line: largest first."""
        return self._ledger.alive()

    @cached_property
    def memory(self) -> report.Memory:
        """The memory over the course of the step."""
        times = self._times() or [0.0]  # a step that does nothing has one point
        series = {name: values.tolist() for name, values in self._ledger.series().items()}
        at = times[self._ledger.peak_event]
        return report.Memory(times, series, self._ledger.peak, at, self.alive, self._marks(times))

    def _times(self) -> list[float]:
        """When each event of the ledger is: with the kernel before it."""
        ends = [0.0, *self._timeline.times]
        found: list[float] = []
        for position in self._positions:
            found.append(max(ends[min(position, len(ends) - 1)], found[-1] if found else 0.0))
        return found

    def _marks(self, times: Sequence[float]) -> list[tuple[float, str]]:
        """When the backward and the step of the optimizer begin."""
        found: dict[str, float] = {}
        for block in self._ledger.blocks:
            if block.phase in (BACKWARD, STEP):
                found.setdefault(block.phase, times[block.born])
        return [(time, f"{phase} begins") for phase, time in found.items()]

    # Time ------------------------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """How long the step takes."""
        return self._timeline.seconds

    @cached_property
    def computing(self) -> float:
        """Seconds in which the device computes."""
        return sum(span.end - span.start for span in self._timeline.spans if span.lane == COMPUTE)

    @cached_property
    def waiting(self) -> float:
        """Seconds in which the device waits for transfers."""
        return sum(span.end - span.start for span in self._timeline.spans if span.lane == WAIT)

    @cached_property
    def queueing(self) -> float:
        """Seconds in which the host starts kernels; on a CPU, those in which it computes are not among them."""
        calls = sum(entry.calls for entry in self._timeline.tape.entries if isinstance(entry, Kernel))
        return calls * self.device.call

    @cached_property
    def flops(self) -> int:
        """Floating point operations of products."""
        return self._tape.flops

    @cached_property
    def sent(self) -> int:
        """Bytes that are sent to other ranks."""
        return sum(one.sent for one in self._tape.sendings)

    @cached_property
    def received(self) -> int:
        """Bytes that come from other ranks."""
        return sum(one.received for one in self._tape.sendings)

    @property
    def transfers(self) -> int:
        """How many there are."""
        return len(self._tape.sendings)

    def sent_to(self, rank: int, world: int) -> dict[int, int]:
        """By rank, the bytes that one of the ranks sends to it: as the one that was looked at does to its peers."""
        found: dict[int, int] = defaultdict(int)
        for (peers, sizes), count in self._patterns.items():
            for peer, size in zip(self._peers_of(rank, peers, world), sizes, strict=False):
                found[peer] += size * count
        return dict(found)

    def _peers_of(self, rank: int, peers: tuple[int, ...], world: int) -> list[int]:
        """Whom a rank sends to, where the one that was looked at sends to these: to the same if they repeat nowhere."""
        everyone = tuple(sorted((*peers, self._rank)))
        if len(everyone) < world and rank not in everyone:
            with suppress(ProcessGroupError):
                everyone = shifted(everyone, rank)
        return [peer for peer in everyone if peer != rank]

    @cached_property
    def _patterns(self) -> dict[tuple[tuple[int, ...], tuple[int, ...]], int]:
        """Who was sent how much in one transfer, and how often."""
        found: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = defaultdict(int)
        for one in self._tape.sendings:
            peers = sorted(one.to)
            if peers:
                found[tuple(peers), tuple(one.to[peer] for peer in peers)] += 1
        return dict(found)

    # Shown -----------------------------------------------------------------------------------------------------------

    def as_part(self) -> report.RankPart:
        """As a part of a report."""
        spans = []
        for span in self._timeline.spans:
            entry = span.entry
            if isinstance(entry, Sending):
                name, size, flops = f"{entry.kind} for {entry.name}", entry.sent, 0
            else:
                name, size, flops = entry.name, 0, entry.flops
            spans.append(report.Span(span.lane, name, entry.module, span.start, span.end, size, flops, entry.line))
        return report.RankPart(
            self.ranks,
            self.device.name,
            self.device.memory,
            self.seconds,
            self.flops,
            self.sent,
            self.received,
            self.memory,
            spans,
            self.modules,
        )

    @cached_property
    def modules(self) -> list[report.ModuleCost]:
        """What each module costs, without the modules within it: the busiest first."""
        seconds: dict[str, float] = defaultdict(float)
        flops: dict[str, int] = defaultdict(int)
        sent: dict[str, int] = defaultdict(int)
        for span in self._timeline.spans:
            if span.lane == COMPUTE and isinstance(span.entry, Kernel):
                seconds[span.entry.module] += span.end - span.start
                flops[span.entry.module] += span.entry.flops
        for one in self._tape.sendings:
            sent[one.module] += one.sent
        kept = self._ledger.kept()
        made = [
            report.ModuleCost(
                path, self._kinds.get(path, ""), seconds[path], flops[path], sent[path], kept.get(path, 0)
            )
            for path in dict.fromkeys([*seconds, *sent, *kept])
        ]
        return sorted(made, key=lambda one: -one.seconds)

    def __str__(self) -> str:
        parts = [f"{name} {bytes_text(size)}" for name, size in self.at_peak.items() if size]
        if self.device.reserved:
            parts.append(f"the runtime {bytes_text(self.device.reserved)}")
        held = f" ({', '.join(parts)})" if parts else ""
        facts = [
            f"peak {bytes_text(self.peak)} of {bytes_text(self.device.memory)}{held}",
            f"{self.seconds * 1e3:,.1f} ms, of which {self.computing * 1e3:,.1f} ms computing and "
            f"{self.waiting * 1e3:,.1f} ms waiting",
        ]
        if self.seconds:
            rate = count_text(int(self.flops / self.seconds))
            facts.append(f"{rate}{'' if rate[-1].isalpha() else ' '}FLOP/s")
        return "; ".join([*facts, f"{bytes_text(self.sent)} sent in {numbered(self.transfers, 'transfer')}"])
