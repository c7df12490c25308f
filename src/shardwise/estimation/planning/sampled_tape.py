"""`SampledTape`: the tapes of a step for any number of samples, known from those for two numbers.

What each kernel computes, reads and writes, and what each transfer sends, grows by the same for each further sample.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from shardwise.estimation.account.tape import Arrival, Kernel, Sending, Tape

Entry = Kernel | Sending | Arrival


class SampledTape:
    """The tapes of one step, by samples."""

    def __init__(self, few: Tape, more: Tape, samples: int) -> None:
        """Of tapes for so many samples, and for twice as many."""
        self._few, self._more, self._samples = few if _are_alike(few, more) else _shrunk(more, few), more, samples
        self._made: dict[int, Tape] = {}

    def of(self, samples: int) -> Tape:
        """The tape for so many samples."""
        if samples not in self._made:
            ratio, made = samples / self._samples - 1, Tape()
            for one, other in zip(self._few.entries, self._more.entries, strict=True):
                entry = _between(one, other, ratio)
                if isinstance(entry, Sending):
                    made.send(entry)
                else:
                    made.entries.append(entry)
            self._made[samples] = made
        return self._made[samples]


def _are_alike(one: Tape, other: Tape) -> bool:
    """Whether the same kernels and transfers come in the same order."""
    pairs = zip(one.entries, other.entries, strict=False)
    return len(one.entries) == len(other.entries) and all(_name(a) == _name(b) for a, b in pairs)


def _name(entry: Entry) -> object:
    return entry if isinstance(entry, Arrival) else (type(entry), entry.name)


def _shrunk(more: Tape, few: Tape) -> Tape:
    """The entries of a tape, smaller: those of one op in one module do together what they do in another tape.

    The other tape may have some more entries, or some fewer, or another order.
    """
    small, large = _totals(few), _totals(more)
    made = Tape()
    for entry in more.entries:
        if isinstance(entry, Arrival):
            made.entries.append(entry)
            continue
        computed, moved = (
            one / other if other else 1.0 for one, other in zip(small[_op(entry)], large[_op(entry)], strict=True)
        )
        if isinstance(entry, Kernel):
            made.entries.append(replace(entry, flops=int(entry.flops * computed), bytes=int(entry.bytes * moved)))
        else:
            less, came, apart = (int(part * moved) for part in (entry.sent, entry.received, entry.network))
            made.send(replace(entry, sent=less, received=came, network=apart, to={}))
    return made


def _op(entry: Kernel | Sending) -> tuple[str, ...]:
    return entry.name, entry.module, entry.kind if isinstance(entry, Sending) else ""


def _totals(tape: Tape) -> dict[tuple[str, ...], tuple[int, int]]:
    """Of each op in each module: floating point operations, and bytes that are read and written, or sent."""
    found: dict[tuple[str, ...], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for entry in tape.entries:
        if not isinstance(entry, Arrival):
            flops, moved = found[_op(entry)]
            size = entry.sent if isinstance(entry, Sending) else entry.bytes
            found[_op(entry)] = flops + (entry.flops if isinstance(entry, Kernel) else 0), moved + size
    return found


def _between(few: Entry, more: Entry, ratio: float) -> Entry:
    """An entry of which the first one has its ratio 0, and the second one 1."""

    def amount(one: int, other: int) -> int:
        return max(int(one + (other - one) * ratio), 0)

    if isinstance(few, Kernel) and isinstance(more, Kernel):
        if (few.flops, few.bytes) == (more.flops, more.bytes):
            return more
        return replace(more, flops=amount(few.flops, more.flops), bytes=amount(few.bytes, more.bytes))
    if isinstance(few, Sending) and isinstance(more, Sending):
        if (few.sent, few.received) == (more.sent, more.received):
            return more
        sent, received = amount(few.sent, more.sent), amount(few.received, more.received)
        return replace(more, sent=sent, received=received, network=amount(few.network, more.network), to={})
    return more
