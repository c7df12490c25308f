"""Random numbers for shards, after which the generators of all ranks have gone on alike.

A rank draws for its own shards, which may be more or fewer than another's, or none. A plain tensor that is drawn next
must be the same on every rank all the same, so a draw for shards counts as one draw, on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.process_group import without_data


@contextmanager
def drawn_here(device: torch.device) -> Iterator[None]:
    """Within this context, draw from this rank's generator as for plain tensors; afterwards it has gone on by one."""
    generator = _generator(device)
    if generator is None:
        yield
        return
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)
        _go_on(generator)


@contextmanager
def drawn_apart(device: torch.device, rank: int) -> Iterator[None]:
    """The same, but each rank draws other numbers: from a seed that is the same on all of them, and its own number."""
    generator = _generator(device)
    if generator is None:
        yield
        return
    with drawn_here(device):
        # From the CPU's generator, for another device would have to be waited for.
        seed = int(torch.randint(2**62, (), generator=torch.default_generator, device="cpu"))
        own = hashlib.blake2b(f"{seed} {rank}".encode(), digest_size=7).digest()
        generator.manual_seed(int.from_bytes(own, "little"))
        yield


def _go_on(generator: torch.Generator) -> None:
    """As after one draw."""
    if generator.device.type == "cuda":
        generator.set_offset(generator.get_offset() + 4)
    else:
        torch.rand((), generator=generator, device=generator.device)


def _generator(device: torch.device) -> torch.Generator | None:
    """torch's own generator of a device; None where nothing is drawn."""
    if without_data() or device.type == "meta":
        return None
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device.type)
    index = module.current_device() if device == torch.device(device.type) else device.index
    found: torch.Generator = module.default_generators[index]
    return found
