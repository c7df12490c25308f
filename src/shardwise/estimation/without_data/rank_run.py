"""Running a step without data, as one rank of a world that is not there."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwise.comm.tracing.record import recording
from shardwise.errors import EstimateError
from shardwise.estimation.account.accounting import Accounting
from shardwise.estimation.account.autocast import autocast_of
from shardwise.estimation.account.gpu_kernels import gpu_kernels_of
from shardwise.estimation.devices.device import Device
from shardwise.estimation.without_data.as_rank import StandInsOfRank, ranks_of_groups
from shardwise.estimation.without_data.fake_world import fake_world
from shardwise.estimation.without_data.stand_ins import (
    converting_modules,
    copying_modules,
    making_meshes,
    no_grad_for_inference,
    restoring_state,
    taking_lists,
)
from shardwise.interop.huggingface.without_values import answering_for_batches
from shardwise.layout.geometry import IntArray
from shardwise.tensor import ShardedTensorBase
from shardwise.torch_private import FAKE_TENSOR_ERRORS

STEPS = 2  # a step settles down in the first ones: states are made, and units are tried on local samples
YOUNG = 50_000  # new objects after which garbage is looked for
CLOSE = 200  # ranks are alike if they differ by less than one part in so many


@dataclass(frozen=True)
class Job:
    """What all ranks of a world do."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    devices: Sequence[Device]  # one for each rank
    machines: Sequence[int]  # the machine of each rank
    steps: int = STEPS
    sets_up: bool = False  # whether the function must set up a step, and may not be the step itself

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.devices)


@dataclass
class RankRun:
    """The account of one rank."""

    rank: int
    accounting: Accounting
    models: list[nn.Module]
    amounts: (
        IntArray  # for each rank, a row of what it holds as far as this rank knows: ranks with equal rows are alike
    )
    stopped: BaseException | None = None  # values decided what comes next


def run_as(rank: int, job: Job, *, settles: bool = True) -> RankRun:
    """Take the step as this rank, and note everything in the last one of several; in all, unless the others settle."""
    with acting_as(rank, job) as (account, (function, args, kwargs)):
        stopped = None
        try:
            _take_steps(account, function, args, kwargs, job, settles)
        except FAKE_TENSOR_ERRORS as error:
            stopped = error
        account.end_step()
        if stopped is None or not account.settles:
            return RankRun(rank, account, list(account.models.values()), _amounts(account, job.ranks), stopped)
    return run_as(rank, job, settles=False)  # the step that stops is the one that is told


@contextmanager
def acting_as(rank: int, job: Job) -> Iterator[tuple[Accounting, list[Any]]]:
    """Within this context, this process is a rank whose tensors have no data, and everything is noted.

    Gives the account; and the job's function, its arguments and its keyword arguments, as a rank without data has them.
    """
    device, groups = job.devices[rank], ranks_of_groups()
    with ExitStack() as stack:
        stack.enter_context(fake_world(rank, job.ranks))
        account = Accounting(device)  # as this rank of that world
        account.trace.machines = job.machines
        as_gpu = autocast_of(device), gpu_kernels_of(device)
        usable = taking_lists(), converting_modules(), copying_modules(), making_meshes(), answering_for_batches()
        eager = torch.compiler.set_stance("force_eager")  # nothing is compiled without data
        graded = no_grad_for_inference()
        for context in (graded, eager, account, recording(account.trace), *as_gpu, account.watching(), *usable):
            stack.enter_context(context)
        stand_ins = StandInsOfRank(account, groups, job.ranks)
        with account.setting_up():
            found = [stand_ins.of(one) for one in (job.function, job.args, job.kwargs)]
        del stand_ins  # which keeps all copies, also those that the step drops
        yield account, found


def _take_steps(
    account: Accounting, function: Callable[..., Any], args: Any, kwargs: Any, job: Job, settles: bool
) -> None:
    """A function that gives a function has set up a step; else it is the step."""
    steps = job.steps
    account.begin_step(settles=settles and steps > 1)
    with account.setting_up() if steps > 1 else nullcontext():  # else this may be the step that is told
        found = function(*args, **kwargs)
    is_set_up = callable(found) and not isinstance(found, nn.Module)
    if job.sets_up and not is_set_up:
        name = getattr(job.function, "__name__", type(job.function).__name__)
        kind = "Tensor" if isinstance(found, torch.Tensor) else type(found).__name__
        raise EstimateError(
            f"the {job.ranks} ranks are more than there are here, so '{name}' is called as each of them: it should set "
            f"up and shard the model, and return a function that takes a step; found that it returns {kind}"
        )
    step = found if is_set_up else lambda: function(*args, **kwargs)
    steps -= not is_set_up
    del found
    for left in reversed(range(steps)):
        account.begin_step(settles=settles and left > 0)
        step()


def _amounts(account: Accounting, ranks: int) -> IntArray:
    """What each rank holds: of all parameters together, and of each argument of a module."""
    rows: dict[Any, np.ndarray[Any, np.dtype[np.float64]]] = {}
    total = np.zeros(ranks)
    for parameter in account.parameters:
        if isinstance(parameter, ShardedTensorBase):
            total += _elements(parameter._layout, ranks) * parameter.element_size()
    rows["parameters"] = total
    for digest, layout in account.layouts.items():
        rows[digest] = _elements(layout, ranks)
    table = np.stack(list(rows.values()), axis=1)
    most = np.maximum(table.max(axis=0, keepdims=True), 1)
    close: IntArray = np.rint(table / most * CLOSE).astype(np.int64)
    return close


def _elements(layout: Any, ranks: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    found = np.zeros(ranks)
    for rank, elements in layout.elements_by_rank().items():
        found[rank] = elements
    return found


def rank_runs(job: Job) -> list[tuple[RankRun, list[int]]]:
    """A run for each group of ranks that have the same device and hold the same amounts, and these ranks.

    The time of a run is that of any device: where only that differs, one run does for both.
    """
    with restoring_state(), _collecting_rarely():
        return _rank_runs(job)


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Within this context, garbage is looked for rarely: an account is many small objects, none of them garbage."""
    before = gc.get_threshold()
    gc.set_threshold(before[0] and max(before[0], YOUNG), *before[1:])  # 0: it is not looked for at all
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _rank_runs(job: Job) -> list[tuple[RankRun, list[int]]]:
    first = run_as(0, job)
    groups: dict[Any, list[int]] = {}
    for rank in range(job.ranks):
        groups.setdefault((tuple(first.amounts[rank].tolist()), job.devices[rank]), []).append(rank)
    runs: dict[Any, RankRun] = {}
    found = []
    for (amounts, device), members in groups.items():
        key = amounts, device.kind, device.block
        if key not in runs:
            runs[key] = run_as(members[0], job) if members[0] else first
        found.append((runs[key], members))
    return found
