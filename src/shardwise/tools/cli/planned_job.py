"""What `plan` and `estimate` share: the model of a configuration; the file that holds a plan, and the job it is for."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

import shardwise
from shardwise.errors import PlanError
from shardwise.estimation.planning import Candidate
from shardwise.interop.huggingface.configuration import model_of_config
from shardwise.tools.cli.contents import UsageError

VERSION = 1  # of the file format


@dataclass(frozen=True)
class PlannedJob:
    """The devices of the ranks, the batch of all of them, and how it is trained."""

    devices: str
    batch: tuple[int, int]  # samples, length
    optimizer: str
    precision: str | None

    def options(self) -> dict[str, Any]:
        """As the planner takes them."""
        return vars(self)

    def changed(self, **given: Any) -> PlannedJob:
        """With other values, where these are given."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})


def make_model(path: str) -> nn.Module:
    """The model of a configuration, without weights."""
    try:
        return model_of_config(path)
    except ImportError as error:
        raise UsageError(
            f"models are made by transformers, which is missing ({error}): pip install 'shardwise[clients]'"
        ) from error


def require_folder(*paths: str | None) -> None:
    """Before anything is computed: the folders of the files to write are there."""
    for path in paths:
        if path is not None and not os.access(Path(path).parent, os.W_OK):
            raise UsageError(f"cannot write '{path}': there is no folder '{Path(path).parent}' to write to")


# Files ---------------------------------------------------------------------------------------------------------------


def write_plan(path: str, candidate: Candidate, job: PlannedJob) -> None:
    """Write a plan, with the job that it was made for."""
    about = {"version": VERSION, "shardwise": shardwise.__version__}
    Path(path).write_text(json.dumps({**about, "job": vars(job), "plan": candidate.as_json()}, indent=1) + "\n")


def require_no_other_file(path: str | None) -> None:
    """Before anything is computed: a file that would be replaced is one of `write_plan`."""
    if path is not None and Path(path).exists():
        try:
            _read(path)
        except UsageError:
            raise UsageError(f"'{path}' is there, and is no plan: give the path of a new file") from None


def read_plan(path: str) -> tuple[Candidate, PlannedJob]:
    """The plan of a file, and the job that it was made for."""
    words = _read(path)
    if words["version"] != VERSION:
        raise UsageError(
            f"the version of the plan '{path}' is {words['version']!r}, and this shardwise reads {VERSION}"
        )
    try:
        job = PlannedJob(**{**words["job"], "batch": tuple(words["job"]["batch"])})
        return Candidate.from_json(words["plan"]), job
    except (KeyError, TypeError, ValueError, PlanError) as error:
        raise UsageError(f"the plan '{path}' is incomplete: {error}") from error


def _read(path: str) -> dict[str, Any]:
    try:
        words = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no file '{path}': `shardwise plan --write {path}` writes one") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"the plan '{path}' is not JSON: {error}") from error
    if not isinstance(words, dict) or not {"version", "job", "plan"} <= words.keys():
        raise UsageError(f"'{path}' is no plan: `shardwise plan --write FILE` writes one")
    return words
