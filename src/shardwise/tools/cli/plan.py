"""``shardwise plan``: which plans there are to train a model on some devices, which fit, and which is fastest."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torch import nn

from shardwise.errors import PlanError
from shardwise.estimation.devices import Device, devices_of, kinds_of
from shardwise.estimation.planning import AutoPlan, Candidate, auto
from shardwise.layout.pictures.words import bytes_text, count_text, lengths_text, numbered, percent
from shardwise.tools.cli.console import Column, Console, names, numbers
from shardwise.tools.cli.planned_job import PlannedJob, make_model, require_folder, require_no_other_file, write_plan

MOST = 20  # plans in the table


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command."""
    job = PlannedJob(options.devices, options.batch, options.optimizer, options.precision)
    devices = devices_of(job.devices)
    require_folder(options.report, options.write)
    require_no_other_file(options.write)
    model = make_model(options.model)
    console.line(_title(model, devices, job), "bold")
    try:
        plan = auto(model, **job.options(), recompute=options.recompute)
    except PlanError as error:
        if isinstance(error.__cause__, ImportError):  # the solver is missing
            raise
        why = str(error).replace("recompute=True", "--recompute")
        console.give({"fits": False, "error": why})
        console.line(why, "red")
        return 1
    console.give({"fits": True, **_answer(plan)})
    _print_table(plan, devices, console)
    _print_choice(plan, console)
    if options.write is not None:
        write_plan(options.write, plan.chosen, job)
        console.line(f"wrote the plan to {options.write}", "green")
    if options.report is not None:
        plan.save(options.report)
        console.line(f"wrote the page to {options.report}", "green")
    return 0


def _title(model: nn.Module, devices: Sequence[Device], job: PlannedJob) -> str:
    count = sum(one.numel() for one in model.parameters())
    dtypes = ", ".join(dict.fromkeys(str(one.dtype).removeprefix("torch.") for one in model.parameters()))
    samples, length = job.batch
    return (
        f"{type(model).__name__}, {count_text(count)} parameters in {job.precision or dtypes}, on "
        f"{_devices_text(devices)}: {numbered(samples, 'sample')} of {length:,}, {job.optimizer}"
    )


def _devices_text(devices: Sequence[Device]) -> str:
    return ", ".join(f"{len(ranks)} {name}" for name, ranks in kinds_of(devices).items())


def _answer(plan: AutoPlan) -> dict[str, object]:
    return {
        "chosen": plan.chosen.name,
        "bound": plan.bound,
        "gap": plan.gap,
        "plans": [{"name": one.name, **one.as_json()} for one in plan.candidates],
        "left out": plan.rejected,
    }


def _print_table(plan: AutoPlan, devices: Sequence[Device], console: Console) -> None:
    kinds = kinds_of(devices)
    rows = []
    for one in plan.candidates[:MOST]:
        memory = [_memory(one, ranks) for ranks in kinds.values()]
        mark = "*" if one is plan.chosen else " "
        samples = lengths_text(one.samples)
        rows.append([mark, one.name, "yes" if one.fits else "no", *memory, seconds_text(one.seconds), samples])
    columns = [
        Column(""),
        names("plan"),
        Column("fits"),
        *map(numbers, kinds),
        numbers("step"),
        names("samples"),
    ]
    console.line()
    console.table(columns, rows)
    if len(plan.candidates) > MOST:
        console.line(f"and {len(plan.candidates) - MOST} more", "dim")


def _memory(one: Candidate, ranks: Sequence[int]) -> str:
    """Of the fullest of these ranks."""
    fullest = one.fullest(ranks)
    return f"{bytes_text(one.needed[fullest])} of {bytes_text(one.memory[fullest])}"


def _print_choice(plan: AutoPlan, console: Console) -> None:
    console.line()
    gap = f"; the chosen plan takes {percent(plan.gap)} more" if plan.gap < 10 else ""
    bound = f"{seconds_text(plan.bound)}: no plan of these kinds takes less{gap}"
    facts = [("chosen", f"{plan.chosen.name}: {plan.chosen.reason}"), ("lower bound", bound)]
    console.facts(facts)
    others = [(f"  {one.name}", one.reason) for one in plan.candidates[1:]]
    others += [(f"  {name}", f"left out: {why}") for name, why in plan.rejected.items()]
    if others:
        console.line("rejected", "bold")
        console.facts(others[:MOST])


def seconds_text(seconds: float) -> str:
    """A time as text: ``12.3 ms`` or ``1.23 s``."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.1f} ms"
