"""Copies on a GPU, one by one and many at once: the same bytes, whatever the alignment."""

from __future__ import annotations

import itertools
import random
from math import prod

import pytest
import torch

from shardwise.comm.transfer.copies import Copies, has_kernels
from shardwise.comm.transfer.views import copy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.complex64], ids=str)
def test_every_alignment(dtype: torch.dtype) -> None:
    """Slabs that begin and end anywhere, in two and three dims, transposed too."""
    plain = (torch.rand(6, 40, device="cuda") * 100).to(dtype)
    for begin, width, offset in itertools.product(range(5), (1, 3, 4, 8, 16, 33), range(3)):
        source = plain[1:5, begin : begin + width]
        whole = torch.zeros(6, 48, dtype=dtype, device="cuda")
        target = whole[1:5, offset : offset + width]
        copy(target, source)
        assert torch.equal(target, source)
        assert int((whole != 0).sum()) <= target.numel()
        turned = torch.zeros(width, 4, dtype=dtype, device="cuda").t()
        copy(turned, source)
        assert torch.equal(turned, source)
        nothing = plain.reshape(-1)[begin:begin]
        copy(torch.empty_like(nothing), nothing)


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
OTHERS = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.complex64, torch.complex128, torch.float8_e4m3fn]
LENGTHS = [0, 1, 2, 3, 5, 8, 16, 33, 64, 130]


def view(numbers: random.Random, sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
    """A box of these sizes, anywhere in a tensor whose dims lie in any order, all of which is random."""
    around = [size + numbers.choice([0, 0, 1, 4, 8]) for size in sizes]
    dims = list(range(len(sizes)))
    if numbers.random() < 0.3:
        numbers.shuffle(dims)
    whole = (torch.rand([around[dim] for dim in dims], device="cuda") * 100).to(dtype)
    found = whole.permute([dims.index(dim) for dim in range(len(dims))])
    for dim, (size, extent) in enumerate(zip(sizes, around, strict=True)):
        found = found.narrow(dim, numbers.randint(0, extent - size), size)
    return found


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(tensor.untyped_storage())


@pytest.mark.parametrize("seed", range(10))
def test_many_copies_at_once(seed: int) -> None:
    """Of every dtype, converted or not, in up to five dims, by a kernel: as torch copies one by one, and nothing beside
    them is touched; twice, with what was changed between."""
    assert has_kernels()
    numbers = random.Random(seed)
    torch.manual_seed(seed)
    pairs, expected = [], []
    for _ in range(80):
        sizes = [numbers.choice(LENGTHS) for _ in range(numbers.randint(0, 5))]
        while prod(sizes) > 300_000:
            sizes[sizes.index(max(sizes))] = 2
        one = numbers.choice([*FLOATS, *OTHERS])
        other = numbers.choice(FLOATS) if one in FLOATS and numbers.random() < 0.5 else one
        pairs.append((view(numbers, sizes, other), view(numbers, sizes, one)))
        target = pairs[-1][0]
        again = memory(target).clone().view(other)
        expected.append(again.as_strided(target.shape, target.stride(), target.storage_offset()))
    copies = Copies(pairs)
    for _ in range(2):
        copies.make()
        for (target, source), plain in zip(pairs, expected, strict=True):
            plain.copy_(source)
            assert torch.equal(memory(target), memory(plain)), (target.dtype, source.dtype, target.shape)
            source.zero_()
