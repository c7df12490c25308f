"""Fourier transforms of dims that are cut, with nothing gathered: rows of any length, and all dims of a cube."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ops.twin import TWO, along, assert_same, normal

from shardwise.testing import ranks

CUBE = normal(4, 3, 5)
OF_CUBES: dict[str, Callable[[Any], Any]] = {
    "fftn": lambda x: torch.view_as_real(torch.fft.fftn(x)),
    "rfftn": lambda x: torch.view_as_real(torch.fft.rfftn(x)),
    "irfftn": lambda x: torch.fft.irfftn(torch.complex(x, x * 2)),
    "stft": lambda x: torch.view_as_real(
        torch.stft(x.reshape(3, 20), 6, 2, window=torch.ones(5).double(), win_length=5, return_complex=True)
    ),
}
OF_ROWS: dict[str, Callable[[Any], Any]] = {
    "fft": lambda x: torch.view_as_real(torch.fft.fft(torch.complex(x, x.flip(0)))),
    "ifft": lambda x: torch.view_as_real(torch.fft.ifft(torch.complex(x, x.flip(0)), norm="ortho")),
    "rfft": lambda x: torch.view_as_real(torch.fft.rfft(x)),
    "irfft": lambda x: torch.fft.irfft(torch.complex(x, x.flip(0))),
    "irfft, odd": lambda x: torch.fft.irfft(torch.complex(x, x.flip(0)), 2 * x.shape[0] - 1),
    "hfft": lambda x: torch.fft.hfft(torch.complex(x, x.flip(0))),
}


@pytest.mark.parametrize("layout", TWO)
@ranks(2)
def test_transforms(layout: str) -> None:
    """Of 12 and of 11 elements, which is a prime number."""
    for name, function in OF_CUBES.items():
        assert_same(function, [(CUBE, TWO[layout])], name)
    for name, function in OF_ROWS.items():
        for size in (11, 12):
            assert_same(function, [(normal(size), TWO[layout])], f"{name} of {size}")


@ranks(4)
def test_on_four_ranks() -> None:
    """Some of which have nothing."""
    for name, function in OF_CUBES.items():
        assert_same(function, [(CUBE, along(1, 2, 0, 3, 1))], name)
    for name in ("fft", "irfft"):
        assert_same(OF_ROWS[name], [(normal(5), along(0, 2, 0, 3, 1))], name)
