"""`SampledTape`: what a step takes for any number of samples."""

from __future__ import annotations

from shardwise.estimation.account.tape import Arrival, Kernel, Sending, Tape
from shardwise.estimation.planning.sampled_tape import SampledTape


def tape(samples: int, *extra: Kernel) -> Tape:
    """Of a step whose product and whose transfer between rows of samples grow, beside one that does not."""
    made = Tape([Kernel("mm", "0", "", 1.0, flops=100 * samples, bytes=64 + 8 * samples), *extra])
    made.send(Sending("gather", "0", "", "all-gather", 1000, 1000, {}, 0))
    made.entries.append(Arrival(0))
    made.send(Sending("linear", "1", "", "exchange", 16 * samples, 8 * samples, {1: 16 * samples}, 4 * samples))
    made.entries.append(Kernel("adamw", "", "", 1.0, bytes=4096, is_step=True))
    return made


def amounts(made: Tape) -> list[tuple[int, ...]]:
    """Of all entries."""
    found: list[tuple[int, ...]] = []
    for one in made.entries:
        if isinstance(one, Kernel):
            found.append((one.flops, one.bytes))
        elif isinstance(one, Sending):
            found.append((one.sent, one.received, one.network))
    return found


def test_amounts_grow_with_the_samples() -> None:
    """Between the two numbers of samples, below and beyond them, down to none."""
    found = SampledTape(tape(10), tape(20), 10)
    for samples in (0, 4, 10, 15, 20, 80):
        assert amounts(found.of(samples)) == amounts(tape(samples))
        assert len(found.of(samples).sendings) == 2


def test_steps_that_are_not_quite_alike() -> None:
    """An op that only one of both has does not change what the others take."""
    found = SampledTape(tape(10), tape(20, Kernel("empty", "0", "", 1.0)), 10)
    assert amounts(found.of(40)) == amounts(tape(40, Kernel("empty", "0", "", 1.0)))
