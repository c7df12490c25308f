"""The tool behind `make coverage-ops`: that it tells right from wrong, for modules and optimizers."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.coverage import module_trial, modules, optimizer_trial, optimizers
from benchmarks.coverage.control import Control
from benchmarks.coverage.layouts import layouts
from benchmarks.coverage.ranks import Session, session
from benchmarks.coverage.report import details, table, worst
from benchmarks.coverage.survey import _records, _result
from benchmarks.coverage.verdict import Findings

from shardwise.testing import ranks


def verdicts(path: Path, kind: str, name: str) -> Findings:
    """What the journal of one thing says."""
    findings = Findings(["shardwise"], kind)
    findings.results[name] = {"shardwise": _result(_records(path), "")}
    return findings


def off(values: Any) -> Any:
    """The same values, the first tensor with an element that is wrong."""
    first = values[0].clone()
    first.view(-1)[0] += 1e-3
    return [first, *values[1:]]


@ranks(3)
def test_planted_faults_are_reported(tmp_path: Path) -> None:
    """Right where it is; wrong outputs, gradients, parameters and state; ranks that differ; and what is refused."""
    warnings.simplefilter("ignore")  # torch's databases use what torch deprecates
    with session(str(tmp_path)) as here, layouts("cpu") as ways:
        case = modules.cases("nn.Linear", 1, "cpu")[0]
        truth = module_trial.truth_of(case)
        assert truth.gradients is not None
        gradients = replace(truth.gradients, expected=off(truth.gradients.expected))
        faults: dict[str, tuple[Any, tuple[str, str]]] = {
            "none": (truth, ("right", "right")),
            "outputs": (replace(truth, outputs=off(truth.outputs)), ("wrong", "right")),
            "gradients": (replace(truth, gradients=gradients), ("right", "wrong")),
        }
        for way in (ways[0], ways[2], ways[4], ways[5]):
            for fault, (said, expected) in faults.items():
                trial = module_trial.ModuleTrial("shardwise:0", case, said, way, "both", here.control)
                assert (trial.forward().verdict, trial.backward().verdict) == expected, (way.name, fault)
        _tell(here, module_trial.ModuleTrial("shardwise", case, faults["outputs"][0], ways[0], "inputs", here.control))
        one_rank = faults["outputs" if dist.get_rank() == 1 else "none"][0]
        diverged = module_trial.ModuleTrial("shardwise", case, one_rank, ways[0], "both", here.control)
        assert diverged.forward().verdict == "diverged"
        broken = replace(case, module=torch.nn.Sequential(torch.nn.LazyLinear(3)))
        refused = module_trial.ModuleTrial("shardwise", broken, truth, ways[0], "both", here.control)
        assert refused.forward().verdict == "refused"
        _optimizers(here.control, ways)
    report = verdicts(tmp_path, "modules", "nn.Linear")
    if dist.get_rank() == 0:
        text = "\n".join([*table(report), *worst(report), *details(report)])
        assert "1 modules tried" in text
        assert "shardwise, forward, wrong (1):\n  nn.Linear" in text
        assert "elements are wrong, the first" in text


def _tell(here: Session, trial: Any) -> None:
    here.attempt(trial, {"system": "shardwise", "sample": 0, "cut": "inputs in rows", "of": "Linear"})


def _optimizers(control: Control, ways: Any) -> None:
    case = next(one for one in optimizers.cases("SGD", "cpu") if one.options.get("momentum"))
    truth = optimizer_trial.truth_of(case)
    state = {name: {key: value + 1e-3 for key, value in one.items()} for name, one in truth.state.items()}
    names = list(truth.parameters)
    moved = dict(zip(names, off(list(truth.parameters.values())), strict=True))
    for way in (ways[0], ways[2], ways[-1]):
        for system in ("sharded", "direct:0"):
            for said, expected in (
                (truth, ("right", "right")),
                (replace(truth, parameters=moved), ("wrong", "right")),
                (replace(truth, state=state), ("right", "wrong")),
            ):
                trial = optimizer_trial.OptimizerTrial(system, case, said, way, control)
                assert (trial.forward().verdict, trial.backward().verdict) == expected, (way.name, system)
