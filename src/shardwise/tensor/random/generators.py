"""`Draw`, a function of torch that fills a tensor with random numbers; torch's generators; and seeding a context."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from shardwise.comm.group import is_capturing, without_data
from shardwise.comm.transfer.in_graph import refuse_in_graph

LARGE = 1 << 26  # elements that every CPU rank draws for a new tensor, to have the numbers of a plain one
SMALL = 1 << 20  # the same for tensors that are drawn in every step, such as the mask of a dropout
STATES_COMPARED = "ranks compare the states of their generators, which a graph does not have"


class Draw(NamedTuple):
    """A random fill. Equal draws fill equal tensors alike from generators in the same state."""

    function: Any  # a method of torch.Tensor that writes in place and takes a generator
    args: tuple[Any, ...] = ()
    most: int = LARGE  # elements that a CPU draws at most to have a few of them
    chunks: int = 1  # on CUDA, how many chunks must be drawn together

    def into(self, tensor: torch.Tensor, generator: torch.Generator | None) -> None:
        """Fill a plain tensor."""
        self.function(tensor, *self.args, generator=generator)


UNIFORM, NORMAL = Draw(torch.Tensor.uniform_), Draw(torch.Tensor.normal_)


DIGEST = 8  # bytes


def default_generator(device: torch.device) -> torch.Generator | None:
    """Torch's generator of a device; None where tensors have no data."""
    refuse_in_graph("drawing random numbers for an op that is no dropout and no random fill", STATES_COMPARED)
    if without_data() or device.type == "meta":
        return None
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device.type)
    index = module.current_device() if device.index is None else device.index
    found: torch.Generator = module.default_generators[index]
    return found


def is_counter_based(generator: torch.Generator) -> bool:
    """Whether the state of a generator is a seed and an offset that can be set, as on CUDA."""
    return generator.device.type == "cuda"


def state_digest(generator: torch.Generator) -> str:
    """A digest of the state of a generator, without waiting for a device; empty while a CUDA graph is captured."""
    if is_counter_based(generator) and is_capturing():
        return ""
    if is_counter_based(generator):
        state = f"{generator.initial_seed()} {generator.get_offset()}".encode()
    else:
        state = generator.get_state().numpy().tobytes()
    return hashlib.blake2b(state, digest_size=DIGEST).hexdigest()


def next_seed(generator: torch.Generator) -> int:
    """A seed from the state of a generator; the generator advances as after one draw."""
    if is_counter_based(generator):
        seed = int(state_digest(generator), 16) >> 1
        generator.set_offset(generator.get_offset() + 4)
        return seed
    device = generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device))


@contextmanager
def layout_independent(seed: int) -> Iterator[torch.Generator]:
    """Within this context, torch's generators have this seed; afterwards they go on as if nothing had been drawn.

    Random sharded tensors have the same global values for any spec and any number of ranks, here as everywhere. Every
    rank enters the context with the same seed, and makes the same tensors in the same order. Nothing travels::

        >>> with shardwise.layout_independent(seed=0):
        ...     rows = shardwise.rand(0, 4, 4)
        >>> with shardwise.layout_independent(seed=0):
        ...     columns = shardwise.rand(1, 4, 4)
        >>> torch.equal(rows.full_tensor(), columns.full_tensor())
        True
    """
    on_device = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # torch's
    devices = [torch.cuda.current_device()] if on_device else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield torch.default_generator
