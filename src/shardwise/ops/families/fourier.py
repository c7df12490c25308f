"""Fourier transforms of dims that are cut: one dim after another, and a single row as a matrix.

The transform of a row of n1 * n2 elements is that of the columns of a matrix, a turn of each element, and that of the
rows; each is whole while it is transformed. A row of a prime number of elements is convolved with a chirp.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from shardwise.ops.engine.call import Call
from shardwise.ops.engine.table import FALLBACKS, TABLE, beyond_budget
from shardwise.ops.families.indexed_rows import model_of
from shardwise.ops.families.reduction import flat_indices
from shardwise.ops.families.sorting import only_cut_dim

aten = torch.ops.aten


def _turns(like: Any, steps: Any, of: int) -> Any:
    """Complex numbers of length 1: a full turn is ``of`` steps."""
    real = torch.float64 if like.dtype == torch.complex128 else torch.float32
    angle = (steps % of).double() * (2 * math.pi / of)
    return torch.complex(angle.cos().to(real), angle.sin().to(real)).to(like.dtype)


def transform_row(x: Any, *, forward: bool) -> Any:
    """The Fourier transform of a complex tensor with one dim, not normalised."""
    size, sign = x.shape[0], -1 if forward else 1
    columns = next((k for k in range(math.isqrt(size), 1, -1) if size % k == 0), 1)
    if size == 1:
        return x * 1
    if columns == 1:
        return _by_chirps(x, sign)
    matrix = aten._fft_c2c(x.reshape(size // columns, columns), [0], 0, forward)
    at = flat_indices(matrix)
    turned = matrix * _turns(x, sign * (at // columns) * (at % columns), size)
    return aten._fft_c2c(turned, [1], 0, forward).t().reshape(-1)


def _by_chirps(x: Any, sign: int) -> Any:
    """By a convolution, whose length is a power of two."""
    size = x.shape[0]
    length = 1 << (2 * size - 2).bit_length()
    at: Any = flat_indices(x)
    chirp = _turns(x, sign * at * at, 2 * size)
    wide: Any = functional.pad(x * chirp, (0, length - size))
    at = flat_indices(wide)
    at = torch.minimum(at, length - at)
    filters = torch.where(at < size, _turns(x, -sign * at * at, 2 * size), torch.zeros((), dtype=x.dtype))
    product = transform_row(wide, forward=True) * transform_row(filters, forward=True)
    return transform_row(product, forward=False)[:size] / length * chirp


def _scale(mode: int, size: int) -> float:
    """By what the transform of so many elements is multiplied, by aten's number of the normalisation."""
    return (1.0, size**-0.5, 1.0 / size)[mode]


def _row(call: Call, dim: int) -> Any:
    x, name = call["self"], call.op.overloadpacket.__name__
    if not only_cut_dim(x, dim):
        return NotImplemented
    row: Any = x.reshape(-1)
    if name == "_fft_c2r":
        size = call["last_dim_size"]
        whole = torch.cat([row[: size // 2 + 1], row[1 : (size + 1) // 2].flip(0).conj().resolve_conj()])
        made = torch.view_as_real(transform_row(whole, forward=False))[..., 0]
    else:
        forward = name == "_fft_r2c" or call["forward"]
        size = row.shape[0]
        made = transform_row(torch.complex(row, row * 0) if name == "_fft_r2c" else row, forward=forward)
        made = made[: size // 2 + 1] if call.arguments.get("onesided") else made
    shape = [made.shape[0] if k == dim % x.ndim else 1 for k in range(x.ndim)]
    return (made * _scale(call["normalization"], size)).reshape(shape)


def _fft(call: Call) -> Any:
    """Along several dims, one after another: each is whole while it is transformed, and others are cut."""
    x, dims = call["self"], list(call["dim"])
    if model_of(call) is None or not dims:
        return NotImplemented
    if len(dims) == 1:
        return _row(call, dims[0])
    name = call.op.overloadpacket.__name__
    *first, last = dims
    if name == "_fft_c2r":
        for dim in first:
            x = aten._fft_c2c(x, [dim], call["normalization"], False)
        return aten._fft_c2r(x, [last], call["normalization"], call["last_dim_size"])
    if name == "_fft_r2c":
        x = aten._fft_r2c(x, [last], call["normalization"], call["onesided"])
        for dim in first:
            x = aten._fft_c2c(x, [dim], call["normalization"], True)
        return x
    for dim in dims:
        x = aten._fft_c2c(x, [dim], call["normalization"], call["forward"])
    return x


def _stft(call: Call) -> Any:
    """Windows of a signal, each transformed."""
    x, size, window = call["self"], call["n_fft"], call["window"]
    if model_of(call) is None or call.arguments.get("align_to_window"):
        return NotImplemented
    rows = x if x.ndim == 2 else x[None]
    frames = rows.unfold(-1, size, call["hop_length"] or size // 4)
    short = call["win_length"] or size
    if window is None and short < size:
        window = torch.ones(short, dtype=x.dtype, device=x.device)
    if window is not None:
        left = (size - window.shape[0]) // 2
        frames = frames * functional.pad(window, (left, size - window.shape[0] - left))
    norm = "ortho" if call["normalized"] else "backward"
    onesided = not frames.is_complex() if call["onesided"] is None else call["onesided"]
    made = (torch.fft.rfft if onesided else torch.fft.fft)(frames, norm=norm).transpose(1, 2)
    made = made if x.ndim == 2 else made[0]
    return made if call["return_complex"] else torch.view_as_real(made)


FALLBACKS.update(dict.fromkeys((aten._fft_c2c, aten._fft_r2c, aten._fft_c2r), _fft))
TABLE[aten.stft.default] = beyond_budget(_stft)
