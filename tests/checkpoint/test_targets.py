"""Whatever memory a tensor has that is loaded into: its values are those that were saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.cases import chunks

import shardwise
from shardwise import zeros
from shardwise.checkpoint import relay
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

SIZE = 30, 26
VALUES = torch.randn(SIZE, generator=torch.Generator().manual_seed(5))
DTYPES = (torch.float32, torch.complex64, torch.bool, torch.float8_e4m3fn, torch.uint16)


def _as(dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_complex:
        return torch.complex(VALUES, -2 * VALUES)
    return VALUES > 0 if dtype is torch.bool else (10 * VALUES).abs().to(torch.int32).to(dtype)


def _targets(dtype: torch.dtype) -> list[torch.Tensor]:
    made = [torch.zeros(SIZE[::-1], dtype=dtype).t(), torch.zeros(60, 26, dtype=dtype)[::2]]
    if dtype.is_complex:
        made.append(torch.zeros(SIZE, dtype=dtype).conj())
    if dtype is torch.float32:
        made.append(torch.zeros(SIZE, dtype=torch.complex64).conj().imag)  # whose sign is the other one
    with torch.inference_mode():
        return [*made, torch.zeros(SIZE, dtype=dtype), torch.zeros(SIZE[::-1], dtype=dtype).t()]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(torch.uint8)


@pytest.mark.parametrize("relayed", [False, True])
@ranks(2)
def test_strided_lazy_and_inference_tensors(tmp_path: Path, relayed: bool) -> None:
    """Read by each rank for itself or relayed, checked or not; and shards, and 0-d and empty ones."""
    state = {str(dtype): shard_tensor(_as(dtype), chunks(0, 0, 1)) for dtype in DTYPES}
    saved = shardwise.save({**state, "0-d": torch.tensor(2.5), "empty": torch.zeros(0, 3)}, tmp_path, wait=False)
    saved.wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay, "WORTH", 1 if relayed else 2**40)
        patch.setattr(relay.ReadCosts, "of", staticmethod(lambda storage, hosts: relay.ReadCosts(9.0, 9.0, hosts)))
        for verify in (True, False):
            for dtype in DTYPES:
                for target in _targets(dtype):
                    shardwise.load({str(dtype): target}, tmp_path, strict=False, verify=verify)
                    assert torch.equal(_bytes(target), _bytes(_as(dtype))), (dtype, target.stride())
                with torch.inference_mode():
                    shards = zeros(chunks(1, 1, 0), *SIZE, dtype=dtype)
                shardwise.load({str(dtype): shards}, tmp_path, strict=False, verify=verify)
                assert torch.equal(_bytes(shards.full_tensor()), _bytes(_as(dtype)))
            small = {"0-d": torch.tensor(0.0), "empty": torch.zeros(0, 3)}
            assert shardwise.load(small, tmp_path, strict=False, verify=verify)["0-d"] == 2.5
