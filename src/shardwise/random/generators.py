"""torch's generators: which one a draw takes its numbers from, and what tells two of their states apart."""

from __future__ import annotations

import hashlib

import torch

from shardwise.process_group import without_data

DIGEST = 8  # bytes


def default_generator(device: torch.device) -> torch.Generator | None:
    """torch's own generator of a device; None where tensors have no data, so that nothing is drawn."""
    if without_data() or device.type == "meta":
        return None
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device.type)
    index = module.current_device() if device.index is None else device.index
    found: torch.Generator = module.default_generators[index]
    return found


def is_counter_based(generator: torch.Generator) -> bool:
    """Whether the state of a generator is a seed and an offset, which can be set to any number: on CUDA."""
    return generator.device.type == "cuda"


def state_digest(generator: torch.Generator) -> str:
    """What tells the state of a generator from others, without waiting for a device."""
    if is_counter_based(generator):
        state = f"{generator.initial_seed()} {generator.get_offset()}".encode()
    else:
        state = generator.get_state().numpy().tobytes()
    return hashlib.blake2b(state, digest_size=DIGEST).hexdigest()


def next_seed(generator: torch.Generator) -> int:
    """A seed made of the state of a generator, which then goes on as after one draw."""
    if is_counter_based(generator):
        seed = int(state_digest(generator), 16) >> 1
        generator.set_offset(generator.get_offset() + 4)
        return seed
    device = generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device))
