"""Patches of `torch.distributed.checkpoint.state_dict` for `ShardedOptimizer`.

`get_optimizer_state_dict` and `set_optimizer_state_dict` expect torch's own optimizers: parameters by number, which
they replace by names of the model; all keys of the state on every rank; and a first step with a learning rate of zero
that makes the state. A `ShardedOptimizer` names its parameters, a rank may hold nothing of a parameter, and needs no
step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.nn.optim import ShardedOptimizer
from shardwise.patching import Function, replace_when_loaded

HELPERS = "torch.distributed.checkpoint.state_dict"
STATE, GROUPS, PARAMS = "state", "param_groups", "params"


def state_dict_by_number(optimizer: ShardedOptimizer) -> dict[str, Any]:
    """The state dict with parameters by number, as torch's optimizers have it. Every rank calls this."""
    state_dict = ShardedOptimizer.state_dict(optimizer)  # torch may have patched the instance
    numbers = {name: number for number, name in enumerate(optimizer.named_params)}
    return {
        **state_dict,
        STATE: {numbers[name]: entry for name, entry in state_dict[STATE].items() if entry},
        GROUPS: [{**group, PARAMS: [numbers[name] for name in group[PARAMS]]} for group in state_dict[GROUPS]],
    }


def load_by_model_names(optimizer: ShardedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Load a state dict whose parameters have the model's names, in the order of the optimizer.

    The names are replaced by the optimizer's own. Every rank calls this, and receives the state that it lacks. The
    optimizer refuses a dict of other parameters, on every rank.
    """
    names = list(optimizer.named_params)
    given = [name for group in state_dict.get(GROUPS, ()) for name in group[PARAMS]]
    if len(given) == len(names):
        own = {name: name for name in names} if set(given) == set(names) else dict(zip(given, names, strict=True))
        entries = {own.get(name, name): entry for name, entry in state_dict[STATE].items()}
        groups = [{**group, PARAMS: [own[name] for name in group[PARAMS]]} for group in state_dict[GROUPS]]
        state_dict = {STATE: {**{name: {} for name in names}, **entries}, GROUPS: groups}
    ShardedOptimizer.load_state_dict(optimizer, state_dict)


def unflatten_state_dict(
    optimizer: ShardedOptimizer, flat: Mapping[str, Any], names_of: Mapping[Any, Any]
) -> dict[str, Any]:
    """The state dict from flat keys such as ``state.weight.exp_avg``, with a group for each parameter.

    ``names_of`` has all names of each parameter in the model; one of them is in the flat dict.
    """
    entries: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for parameter in (parameter for group in optimizer.param_groups for parameter in group[PARAMS]):
        names = sorted(names_of[parameter])
        name = next((one for one in names if _below(flat, f"{GROUPS}.{one}.")), names[0])
        groups.append({**_below(flat, f"{GROUPS}.{name}."), PARAMS: [name]})
        entries[name] = _nested(_below(flat, f"{STATE}.{name}."))
    return {STATE: entries, GROUPS: groups}


def _below(flat: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in flat.items() if key.startswith(prefix)}


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts from keys with dots."""
    made: dict[str, Any] = {}
    for key, value in flat.items():
        *outer, last = key.split(".")
        inner = made
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return made


# Patches of torch's functions, which use the functions above for a `ShardedOptimizer`.


def _skip_first_step(theirs: Function) -> Function:
    def init_optim_state(optim: Any) -> None:
        if not isinstance(optim, ShardedOptimizer):
            theirs(optim)

    return init_optim_state


def _state_dict_functions(theirs: Function) -> Function:
    def state_dict_fn(obj: Any, api: str) -> Function:
        if not isinstance(obj, ShardedOptimizer):
            function: Function = theirs(obj, api)
            return function
        if api == "state_dict":
            return lambda: state_dict_by_number(obj)
        return lambda state_dict: load_by_model_names(obj, state_dict)

    return state_dict_fn


def _unflatten(theirs: Function) -> Function:
    def unflatten_optim_state_dict(optim: Any, state_dict: Any, info: Any) -> Any:
        if isinstance(optim, ShardedOptimizer):
            return unflatten_state_dict(optim, state_dict, info.fqn_param_mapping)
        return theirs(optim, state_dict, info)

    return unflatten_optim_state_dict


replace_when_loaded(HELPERS, "_init_optim_state", _skip_first_step)
replace_when_loaded(HELPERS, "_state_dict_fn", _state_dict_functions)
replace_when_loaded(HELPERS, "_unflatten_optim_state_dict", _unflatten)
