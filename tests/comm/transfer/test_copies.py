"""Copies where Triton is there and does not work."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.comm.transfer import copies


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As in an image without gcc, or without a GPU: it is told once, and views are copied one by one."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setitem(sys.modules, "shardwise.comm.transfer.copy_kernel", SimpleNamespace(launches=fail))
    monkeypatch.setattr(copies, "find_spec", lambda name: name)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    monkeypatch.setattr(torch, "ones", lambda *size, device: zeros(*size))
    assert not copies.has_kernels.__wrapped__()
    assert "copied one by one, for Triton fails: Failed to find C compiler" in caplog.text
