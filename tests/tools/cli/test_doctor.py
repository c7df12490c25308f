"""`shardwise doctor`: what is here, and what fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.tools.cli.states import Cli

from shardwise.testing import RankFailure
from shardwise.tools.cli import doctor


def test_doctor_says_what_is_here_and_what_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """On real ranks; a failure is shown with its reason, and the exit code is 1."""
    code, out, _ = cli("doctor", "--json")
    found = json.loads(out)
    assert (code, found["ok"], len(found["tests"])) == (0, True, 5)
    assert found["versions"]["torch"] == torch.__version__
    assert found["backends"]["gloo"]

    def broken(ranks: int, test: Callable[..., None], *args: Any) -> None:
        if test is doctor._test_redistribute:
            raise RankFailure("rank 1 of 2 failed: no such luck")

    monkeypatch.setattr(doctor, "run_on_ranks", broken)
    code, out, _ = cli("doctor")
    assert (code, "redistribute: rank 1 of 2 failed: no such luck" in out, "1 failed" in out) == (1, True, True)
