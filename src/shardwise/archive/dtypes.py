"""dtypes by name. A name in a file is looked up here and never in a module, which would import what it names."""

from __future__ import annotations

import torch

from shardwise.errors import CheckpointError

_NAMES = """
    bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 complex64
    complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
    """
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)}


def dtype_named(name: object, tensor: str) -> torch.dtype:
    """The dtype of a tensor whose name is given too, for the error."""
    found = DTYPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise CheckpointError(f"tensor '{tensor:.200}' is of dtype {name!r:.50}, which is unknown")
    return found


def name_of_dtype(dtype: torch.dtype) -> str:
    """How files call a dtype."""
    return str(dtype).removeprefix("torch.")
