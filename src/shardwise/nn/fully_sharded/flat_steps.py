"""Steps of torch's optimizers over flat memory: a few plain tensors instead of many sharded ones.

An optimizer that treats elements one by one does to a stretch of flat memory what it does to the parameters in it. So
before a step of such an optimizer, the stretches of fully sharded parameters are stepped by an optimizer of the same
class and options on plain tensors, and the step itself skips these parameters. The states are flat, too; the optimizer
has them as sharded tensors, which are views, so that they are saved, loaded and moved as ever.

Muon looks at whole matrices. It steps those that lie whole on one rank as plain ones, on that rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.autograd.versions import version_of
from shardwise.nn.fully_sharded.flat_memory import FlatMemory, FlatParameter
from shardwise.nn.optim.template import step_without_hooks
from shardwise.tensor import ShardedTensor
from shardwise.tensor.frame import Parts

BY_ELEMENT = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Rprop,
)

BY_MATRIX = (torch.optim.Muon,)

_in_memory = WeakIdKeyDictionary()  # parameter → its memory, which refers to the parameter, and its number there
_stepped: WeakKeyDictionary[Optimizer, FlatOptimizer] = WeakKeyDictionary()


def step_flat(memory: FlatMemory) -> None:
    """Have optimizers step the parameters of this memory together from now on."""
    if not len(_in_memory):
        _install()
    for number, one in enumerate(memory.parameters):
        _in_memory[one.sharded] = weakref.ref(memory), number


def _install() -> None:
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(_before_step))
        _installed.append(register_optimizer_step_post_hook(_after_step))


_installed: list[Any] = []


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _stepped:
        _stepped[optimizer].restore()
    if type(optimizer) not in BY_ELEMENT + BY_MATRIX or len(args) > 1 or kwargs.get("closure") is not None:
        return
    if getattr(optimizer, "grad_scale", None) is not None:
        return
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return  # they come after this hook, and look at gradients and parameters
    by_matrix = type(optimizer) in BY_MATRIX
    runs = [_runs(group["params"], by_matrix=by_matrix) for group in optimizer.param_groups]
    if any(runs):
        if optimizer not in _stepped:
            _stepped[optimizer] = FlatOptimizer(optimizer)
        _stepped[optimizer].step(runs)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _stepped:
        _stepped[optimizer].restore()


@dataclass(frozen=True)
class FlatRun:
    """Parameters of a memory that lie one behind another."""

    memory: FlatMemory
    parameters: tuple[FlatParameter, ...]
    is_matrix: bool = False  # of one parameter, which keeps its shape

    def part_of(self, flat: torch.Tensor) -> torch.Tensor:
        """These parameters in a tensor that lies as the rank's stretch does."""
        low, high = self.place
        return self.shaped(flat[low:high])

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """The same elements as a matrix; without rows where the rank has nothing of it."""
        if not self.is_matrix:
            return flat
        rows, *rest = self.parameters[0].sharded.shape
        return flat.view(rows if flat.numel() else 0, *rest)

    @property
    def place(self) -> tuple[int, int]:
        """Where they lie in the rank's stretch; nowhere where the rank has nothing of them."""
        stretches = [stretch for one in self.parameters for stretch in one.stretches]
        return (stretches[0][0], stretches[-1][1]) if stretches else (0, 0)


def _runs(parameters: Sequence[torch.Tensor], *, by_matrix: bool) -> list[FlatRun]:
    """The runs of those parameters of a group that have flat gradients; of matrices, those that lie on one rank."""
    chosen: dict[FlatMemory, set[int]] = {}
    for parameter in parameters:
        found: Any = _in_memory.get(parameter)  # type: ignore[no-untyped-call] # torch's
        memory = None if found is None else found[0]()
        if memory is not None:
            chosen.setdefault(memory, set()).add(found[1])
    runs: list[FlatRun] = []
    for memory, wanted in chosen.items():
        flat = [number in wanted and memory.has_flat_grad(one) for number, one in enumerate(memory.parameters)]
        if by_matrix:
            matrices = [one for is_flat, one in zip(flat, memory.parameters, strict=True) if is_flat and _is_whole(one)]
            runs += [FlatRun(memory, (one,), is_matrix=True) for one in matrices]
            continue
        for is_flat, some in groupby(zip(flat, memory.parameters, strict=True), lambda pair: pair[0]):
            if is_flat:
                runs.append(FlatRun(memory, tuple(one for _, one in some)))
    return runs


def _is_whole(one: FlatParameter) -> bool:
    """Whether no box is a part of the parameter only. The same on every rank."""
    layout = one.sharded._layout
    return one.sharded.ndim == 2 and bool((layout.boxes.sizes[layout.pattern.filled] == layout.size).all())


class FlatOptimizer:
    """The optimizer on plain tensors that steps for another one."""

    def __init__(self, outer: Optimizer) -> None:
        self._kind: Any = type(outer)
        self._outer: Any = weakref.proxy(outer)
        self._inner: Any = None
        self._runs: list[list[FlatRun]] = []
        self._tensors: list[list[torch.Tensor]] = []  # of the inner optimizer, for each run
        self._given: dict[int, dict[str, Any]] = {}  # by parameter, the states that the outer optimizer was given
        self._versions: dict[tuple[int, str], int] = {}  # of numbers among them, when they were last written here
        self._hidden: list[list[torch.Tensor]] | None = None  # the parameters of all groups, while a step skips some

    def step(self, runs: list[list[FlatRun]]) -> None:
        """Step these runs of each group, and let the outer optimizer skip them."""
        is_ready = self._inner is not None and runs == self._runs and self._is_current()
        if not is_ready and not self._begin(runs):
            return
        for mine, outer in zip(self._inner.param_groups, self._outer.param_groups, strict=True):
            mine.update(_options(outer))
        for group, tensors in zip(runs, self._tensors, strict=True):
            for run, tensor in zip(group, tensors, strict=True):
                assert run.memory.grad is not None
                tensor.grad = run.part_of(run.memory.grad)
        step_without_hooks(self._inner, None)
        for tensor in chain.from_iterable(self._tensors):
            tensor.grad = None  # which would keep the memory of the gradients until the next step
        self._give_states()
        self._hidden = [group["params"] for group in self._outer.param_groups]
        skipped = {id(one.sharded) for group in runs for run in group for one in run.parameters}
        for group in self._outer.param_groups:
            group["params"] = [one for one in group["params"] if id(one) not in skipped]

    def restore(self) -> None:
        """After a step: the outer optimizer has all its parameters."""
        if self._hidden is not None:
            for group, parameters in zip(self._outer.param_groups, self._hidden, strict=True):
                group["params"] = parameters
        self._hidden = None

    # States ----------------------------------------------------------------------------------------------------------

    def _share_numbers(self, run: FlatRun, state: dict[str, Any]) -> None:
        """Bring numbers, such as the count of steps, to each parameter, which has its own."""
        for name, value in state.items():
            for one in run.parameters:
                given = self._given.get(id(one.sharded))
                if given is None or name not in given:
                    continue
                if not isinstance(value, torch.Tensor):
                    given[name] = self._outer.state[one.sharded][name] = value
                elif not value.ndim:
                    given[name].copy_(value)
                    self._versions[id(one.sharded), name] = version_of(given[name])

    def _has(self, one: FlatParameter, given: dict[str, Any]) -> bool:
        """Whether the outer optimizer still has the states that it was given for a parameter.

        Others may be written to, for they share their memory; numbers, as a checkpoint does, may not.
        """
        now = self._outer.state.get(one.sharded, {})
        if given.keys() != now.keys() or any(value is not now[name] for name, value in given.items()):
            return False
        written = ((name, version_of(value)) for name, value in given.items() if _is_number(value))
        return all(self._versions.get((id(one.sharded), name)) == version for name, version in written)

    def _is_current(self) -> bool:
        """Whether the states of the outer optimizer are those that it was given."""
        parameters = (one for group in self._runs for run in group for one in run.parameters)
        return all(self._has(one, self._given.get(id(one.sharded), {"": None})) for one in parameters)

    def _begin(self, runs: list[list[FlatRun]]) -> bool:
        """Make an inner optimizer with the states that the outer one has. Gives whether it could."""
        before = [[self._flat_state(run) for run in group] for group in runs]
        self._given = {}
        if any(state is None for group in before for state in group):
            self._inner = None
            return False
        self._runs = runs
        self._tensors = [[run.part_of(run.memory.shard).detach() for run in group] for group in runs]
        groups = [
            {name: value for name, value in outer.items() if name not in ("params", "param_names")}
            | {"params": tensors}
            for outer, tensors in zip(self._outer.param_groups, self._tensors, strict=True)
        ]
        self._inner = self._kind(groups)
        for states, tensors in zip(before, self._tensors, strict=True):
            for state, tensor in zip(states, tensors, strict=True):
                if state:
                    self._inner.state[tensor] = state
        return True

    def _flat_state(self, run: FlatRun) -> dict[str, Any] | None:
        """The states of parameters one behind another as one; None where they have no common one."""
        states = [self._outer.state.get(one.sharded, {}) for one in run.parameters]
        if any(state.keys() != states[0].keys() for state in states):
            return None
        flat: dict[str, Any] = {}
        for name in states[0]:
            values = [state[name] for state in states]
            made = _joined(run, values)
            if made is None:
                return None
            flat[name] = made[0]
        return flat

    def _give_states(self) -> None:
        """Let the outer optimizer have the states, as sharded tensors over the same memory."""
        for group, tensors in zip(self._runs, self._tensors, strict=True):
            for run, tensor in zip(group, tensors, strict=True):
                state = self._inner.state[tensor]
                self._share_numbers(run, state)
                for one in run.parameters:
                    given = self._given.get(id(one.sharded))
                    if given is not None and given.keys() == state.keys() and self._has(one, given):
                        continue
                    made = {name: _part(run, one, value, tensor) for name, value in state.items()}
                    self._given[id(one.sharded)], self._outer.state[one.sharded] = dict(made), made
                    for name, value in made.items():
                        if _is_number(value):
                            self._versions[id(one.sharded), name] = version_of(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.ndim and not isinstance(value, ShardedTensor)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _joined(run: FlatRun, values: list[Any]) -> tuple[Any] | None:
    """One state for all parameters of a run."""
    if all(isinstance(value, ShardedTensor) for value in values):
        if any(value._layout != one.sharded._layout for value, one in zip(values, run.parameters, strict=True)) or any(
            value.dtype != values[0].dtype for value in values
        ):
            return None
        parts = [local.reshape(-1) for value in values for local in value._local_tensors()]
        empty = torch.empty(0, dtype=values[0].dtype, device=run.memory.shard.device)
        return (run.shaped(torch.cat(parts) if parts else empty),)
    if any(isinstance(value, ShardedTensor) for value in values):
        return None
    if all(isinstance(value, torch.Tensor) for value in values):
        same = all(value is values[0] or torch.equal(value, values[0]) for value in values)
        return (values[0].clone(),) if same and not values[0].ndim else None
    return (values[0],) if all(value == values[0] for value in values) else None


def _part(run: FlatRun, one: FlatParameter, value: Any, tensor: torch.Tensor) -> Any:
    """What a state of a run is for one of its parameters."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != tensor.shape:
        return value.clone()
    low, _ = run.place
    sharded = one.sharded
    parts = [
        value.view(-1)[begin - low : end - low].view(local.shape)
        for local, (begin, end) in zip(sharded._local_tensors(), one.stretches, strict=True)
    ]
    return ShardedTensor._wrap(Parts(sharded._frame.with_dtype(value.dtype), parts))
