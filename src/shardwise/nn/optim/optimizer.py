"""`ShardedOptimizer`: any torch optimizer over plain and sharded parameters, by name."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardwise.autograd.versions import version_of
from shardwise.comm.agreement import notify_if_alone
from shardwise.comm.group import Fields, without_data
from shardwise.errors import OptimizerError, OptimizerStateError
from shardwise.nn.optim import loading, naming, state, template
from shardwise.nn.optim.member import Member
from shardwise.nn.optim.roster import Roster, in_step_if_sharded, leaves_of
from shardwise.nn.optim.scope import TORCH, scope_of
from shardwise.nn.optim.state import Share
from shardwise.nn.optim.stepping import Closure, step_in_place, step_jointly, step_whole

UPDATED = {"element": "where they lie", "tensor": "each whole on one rank", "model": "all whole on every rank"}


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose parameters may be sharded, and have names. Training is that of the plain twin.

    ``named_params`` is a mapping such as ``dict(model.named_parameters())``, or pairs, or a list of groups: dicts whose
    ``params`` are such, with options beside them. ``optimizer_class`` is one of torch's, or another in an
    `UpdateScope` that says what its updates look at; the arguments after it are given to it, as they are.

    An optimizer that updates elements one by one runs on the shards where they lie, and a step sends nothing. One that
    looks at whole parameters gets each whole on one rank, for the time of the step. One that looks at all of them at
    once, such as LBFGS, gets all of them on every rank, with its state. Every rank makes it, alike; a digest travels::

        >>> model = shardwise.shard_module(torch.nn.Linear(4, 4), {"weight": 0, "bias": None})
        >>> optimizer = shardwise.ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, lr=1e-3)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state_dict()["state"]["weight"])
        ['exp_avg', 'exp_avg_sq', 'step']

    Raises `OptimizerError` for an optimizer that cannot train these parameters.
    """

    def __init__(
        self,
        named_params: Mapping[str, torch.Tensor] | Any,
        optimizer_class: Any,
        *optimizer_args: Any,
        **optimizer_kwargs: Any,
    ) -> None:
        groups = naming.parse_groups(named_params)
        naming.require_distinct(groups)
        roster = Roster(*scope_of(optimizer_class), (optimizer_args, optimizer_kwargs), groups)
        self._initial: dict[torch.Tensor, dict[str, Any]] = {}  # leaves with state of `init_state`, and its versions
        self._has_started = False  # by a step or a loaded state; the same on every rank
        self._without_template: list[str] = []  # parameters whose state is unknown before the first step
        self._last_entries: Any = None  # of the last state dict, if such parameters have none in it
        pairs = [{**naming.options(group), "params": list(group["params"].items())} for group in groups]
        super().__init__(pairs, roster.inner.defaults)  # which calls `add_param_group`
        self._roster = roster
        self._return_options()

    def add_param_group(self, param_group: Any) -> None:
        """Train further parameters: a dict of named ``params`` and options. Every rank calls it; a digest travels."""
        if "_roster" not in vars(self):  # called by torch's constructor
            super().add_param_group(param_group)
            return
        group = naming.parse_group(param_group)
        self._roster.add(group)
        super().add_param_group({**naming.options(group), "params": list(group["params"].items())})
        self._return_options()

    @property
    def named_params(self) -> dict[str, torch.Tensor]:
        """Every parameter by its name, plain and sharded."""
        return self._roster.named

    # Steps ----------------------------------------------------------------------------------------------------------

    def step(self, closure: Closure | None = None) -> Any:
        """Update every parameter that has a gradient; give the loss, if a closure computes one.

        Every rank calls it. Nothing travels where elements are updated one by one. Else whole parameters and their
        gradients go to where they are updated, and the parameters back. A parameter that was resharded takes its
        state along.
        """
        roster = self._roster
        self._has_started, self._last_entries = True, None
        for member in roster.sharded:
            if member.parameter._tensors is not member.locals and not member.is_current():  # type: ignore[attr-defined] # sharded
                self._move_state()
                break
        if self._initial:
            self._drop_initial()
        for group, inner in zip(self.param_groups, roster.inner.param_groups, strict=True):
            for key in group:
                if key != "params" and key != "param_names":
                    inner[key] = group[key]
        roster.note_step()
        try:
            if not roster.gathered:
                loss = step_in_place(roster, closure)
            else:
                loss = (step_jointly if roster.scope == "model" else step_whole)(roster, closure)
        except Exception as error:
            notify_if_alone(roster.group, error)
            raise
        self._return_options()
        return loss

    def register_step_pre_hook(self, hook: Any) -> Any:
        """As of any optimizer. An error on one rank is sent to the others."""
        return super().register_step_pre_hook(self._notifying(hook))

    def register_step_post_hook(self, hook: Any) -> Any:
        """As of any optimizer. An error on one rank is sent to the others."""
        return super().register_step_post_hook(self._notifying(hook))

    def _notifying(self, hook: Any) -> Any:
        @functools.wraps(hook, updated=())
        def notifying(*args: Any) -> Any:
            with self._notify_on_error():
                return hook(*args)

        return notifying

    @contextmanager
    def _notify_on_error(self) -> Iterator[None]:
        """Send an error that is raised within to the other ranks."""
        try:
            yield
        except Exception as error:
            notify_if_alone(self._roster.group, error)
            raise

    def _return_options(self) -> None:
        """Copy the options that torch's optimizer has set."""
        for group, inner in zip(self.param_groups, self._roster.inner.param_groups, strict=True):
            for key in inner:
                if key != "params" and key != "param_names":
                    group[key] = inner[key]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or set them to zero. No communication."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for member in self._roster.members:
            member.parameter.grad = None

    def _move_state(self) -> None:
        """Move the state to the current layouts of the parameters."""
        self._roster.move_state({member.name: o for members, o in self._with_options() for member in members})
        here = set(leaves_of(self._roster.members))
        self._initial = {leaf: versions for leaf, versions in self._initial.items() if leaf in here}

    # State ----------------------------------------------------------------------------------------------------------

    @property  # type: ignore[override] # torch has a dict
    def state(self) -> Mapping[torch.Tensor, Any]:
        """The state of each parameter on this rank, over the same memory. No communication."""
        return state.States(self._roster.members, self._roster.inner.state)

    @state.setter
    def state(self, given: Any) -> None:
        if given:  # torch's constructor gives an empty one
            raise OptimizerError("the state is that of the shards: load it with load_state_dict")

    def state_dict(self) -> dict[str, Any]:
        """The state by parameter name, and the options of the groups with the names in ``params``.

        Every rank calls it, and all get the same names and keys. State of a parameter's size is sharded as the
        parameter is, over the memory of the optimizer where it lies so; what kinds of state there are travels, and what
        lies elsewhere. Before the first step it has the state of `init_state`, so that `torch.distributed.checkpoint`
        finds a place for what it loads.
        """
        return self._state_dict(None if self._has_started else self._init_known_state)

    def state_dict_so_far(self) -> dict[str, Any]:
        """As `state_dict`, without the state of `init_state`: before the first step, none."""
        return self._state_dict(None)

    def state_dict_where_it_lies(self, share: Share) -> dict[str, Any]:
        """As `state_dict_so_far`, and none of it travels: what is updated at one rank is there.

        The ranks tell each other what kinds of state there are by ``share``, for some of the group may be lost.
        """
        return self._state_dict(None, share)

    def _state_dict(self, prepare: Callable[[], None] | None, share: Share | None = None) -> dict[str, Any]:
        roster = self._roster

        def ready() -> Any:
            for before in self._optimizer_state_dict_pre_hooks.values():
                before(self)
            self._move_state()
            if prepare is not None:
                prepare()
            return roster.members, roster.inner.state

        entries = state.state_by_name(ready, roster.group, share)
        groups = [
            {**options, "params": [member.name for member in members]} for members, options in self._with_options()
        ]
        self._last_entries = entries if self._without_template and not self._has_started else None
        made: dict[str, Any] = {"state": entries, "param_groups": groups}
        with self._notify_on_error():
            for after in self._optimizer_state_dict_post_hooks.values():
                changed = after(self, made)
                made = made if changed is None else changed
        return made

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take on state by parameter name, from any layout: sharded in any way, or whole. Every rank calls it.

        The groups' options are found by the names in them. All that is unknown, missing or of a wrong size is told in
        one error, on every rank, and then nothing has changed. What a rank lacks of its part travels.
        """
        roster = self._roster

        def check() -> tuple[loading.LoadedState, Fields]:
            given: Any = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict
            for before in self._optimizer_load_state_dict_pre_hooks.values():
                changed = before(self, given)
                given = given if changed is None else changed
            self._move_state()
            self._require_filled(given)
            strict, shapes = roster.optimizer_class in TORCH, template.Shapes(roster.new_optimizer)

            def shapes_of(member: Member, number: int, options: Mapping[str, Any]) -> dict[str, template.Shape] | None:
                if roster.scope == "model":
                    return None  # it keeps what it likes, where it likes
                own = naming.options(self.param_groups[number])
                return shapes.of(member.parameter, number, {**own, **options})

            loaded = loading.check_state_dict(
                given, roster.groups, roster.group, scope=roster.scope, shapes=shapes_of, strict=strict
            )
            return loaded, {"verb": "load_state_dict", "state": loaded.outline}

        loaded = in_step_if_sharded(roster.group, check)
        options = {member.name: o for members, o in self._with_options(loaded.options) for member in members}
        new = state.state_by_leaf(roster.members, loaded.entries, options)
        in_step_if_sharded(roster.group, lambda: (None, {"verb": "loaded"}))  # on every rank
        roster.inner.state.clear()
        roster.inner.state.update(new)
        self._initial, self._has_started, self._last_entries = {}, True, None
        for group, over in zip(self.param_groups, loaded.options, strict=True):
            group.update(over)
        with self._notify_on_error():
            for after in self._optimizer_load_state_dict_post_hooks.values():
                after(self)

    def _require_filled(self, given: Any) -> None:
        """Raise if this optimizer gets its own empty entries back: a checkpoint could not be read into them."""
        entries = given.get("state") if isinstance(given, Mapping) else None
        if entries is None or entries is not self._last_entries or any(map(entries.get, self._without_template)):
            return
        raise OptimizerStateError(
            f"nothing was loaded for {', '.join(map(repr, self._without_template[:3]))}: what state "
            f"{self._roster.optimizer_class.__name__} keeps is not known before its first step, so its state_dict() "
            "has no place yet for a checkpoint to be read into. Use shardwise.save and shardwise.load, which need none"
        )

    def init_state(self) -> None:
        """Make the state that the first step would make, so that a checkpoint can be read into `state_dict()`.

        Parameters stay as they are. Unless it is written into, by `load_state_dict` or in place, the first step is that
        of a new optimizer. No communication.
        """
        roster = self._roster
        if roster.scope == "model":
            if roster.inner.state:
                return
            raise OptimizerError(
                f"{roster.optimizer_class.__name__} makes its state as it goes, so none can be made before: "
                "load it with load_state_dict"
            )
        for members, options in self._with_options():
            self._init_state_of(members, options)

    def _init_known_state(self) -> None:
        """`init_state` for a state dict, without the parameters whose state is unknown."""
        shapes = template.Shapes(self._roster.new_optimizer)
        self._without_template = []
        for number, (members, options) in enumerate(self._with_options()):
            for member in members:
                unknown = self._roster.scope == "model" or member.parameter.is_meta or without_data()
                if unknown or shapes.of(member.parameter, number, options) is None:
                    self._without_template.append(member.name)
                else:
                    self._init_state_of([member], options)

    def _init_state_of(self, members: Sequence[Member], options: dict[str, Any]) -> None:
        state = self._roster.inner.state
        for leaf in leaves_of(members):
            if leaf.requires_grad and not state.get(leaf):
                state[leaf] = template.first_state(self._roster.new_optimizer, options, leaf)
                self._initial[leaf] = _versions(state[leaf])

    def _drop_initial(self) -> None:
        """Drop the state of `init_state` that was not written into: the first step makes it."""
        for leaf, versions in self._initial.items():
            if _versions(self._roster.inner.state.get(leaf, {})) == versions:
                self._roster.inner.state.pop(leaf, None)
        self._initial = {}

    def _with_options(
        self, loaded: Sequence[Mapping[str, Any]] | None = None
    ) -> Iterator[tuple[list[Member], dict[str, Any]]]:
        """The members of each group, and its options, loaded ones over its own."""
        groups = self._roster.groups
        for members, group, over in zip(groups, self.param_groups, loaded or [{}] * len(groups), strict=True):
            yield members, {**naming.options(group), **over}

    # Python's protocols ---------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedOptimizer:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        for name, value in vars(self).items():
            if name != "step":  # bound to this optimizer by a scheduler
                vars(new)[name] = copy.deepcopy(value, memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OptimizerError("an optimizer of sharded parameters cannot be pickled: save its state_dict()")

    def __repr__(self) -> str:
        roster = self._roster
        lines = [f"{type(self).__name__} of {len(roster.members)} parameters by {roster.optimizer_class.__name__}, "]
        lines[0] += f"{len(roster.sharded)} sharded, updated {UPDATED[roster.scope or 'element']}"
        for number, (members, options) in enumerate(self._with_options()):
            names = [member.name for member in members]
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            lines.append(f"  group {number}: {shown}; " + ", ".join(f"{k}={v}" for k, v in options.items()))
        return "\n".join(lines)


def _versions(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Identities and versions of tensors, which change when state is written into."""
    return {key: (id(v), version_of(v)) if isinstance(v, torch.Tensor) else v for key, v in entry.items()}
