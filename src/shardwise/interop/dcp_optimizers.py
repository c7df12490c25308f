"""What `torch.distributed.checkpoint.state_dict` is told of a `ShardedOptimizer`, when it is loaded.

`get_optimizer_state_dict` and `set_optimizer_state_dict` expect what torch's own optimizers do: parameters by their
numbers, which they exchange for the names in the model; state in which every rank finds every key; and a first step
with a learning rate of zero to make it. Here parameters have names already, a rank may hold nothing of a parameter, and
state is made without a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.interop.loading import Function, replace_when_loaded
from shardwise.sharded_optim import ShardedOptimizer

HELPERS = "torch.distributed.checkpoint.state_dict"
STATE, GROUPS, PARAMS = "state", "param_groups", "params"


def numbered(optimizer: ShardedOptimizer) -> dict[str, Any]:
    """The state dict with a number for each parameter, as torch's optimizers give it. Every rank calls it."""
    state_dict = ShardedOptimizer.state_dict(optimizer)  # for torch may have patched that of the instance
    numbers = {name: number for number, name in enumerate(optimizer.named_params)}
    return {
        **state_dict,
        STATE: {numbers[name]: entry for name, entry in state_dict[STATE].items() if entry},
        GROUPS: [{**group, PARAMS: [numbers[name] for name in group[PARAMS]]} for group in state_dict[GROUPS]],
    }


def load_by_model_names(optimizer: ShardedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Load a state dict whose parameters have the names of the model, in the order of the optimizer.

    Where those are not the names that the optimizer knows, they are exchanged. Every rank calls it; what a rank lacks
    travels. A dict of other parameters is refused by the optimizer, on every rank.
    """
    names = list(optimizer.named_params)
    given = [name for group in state_dict.get(GROUPS, ()) for name in group[PARAMS]]
    if len(given) == len(names):
        own = {name: name for name in names} if set(given) == set(names) else dict(zip(given, names, strict=True))
        entries = {own.get(name, name): entry for name, entry in state_dict[STATE].items()}
        groups = [{**group, PARAMS: [own[name] for name in group[PARAMS]]} for group in state_dict[GROUPS]]
        state_dict = {STATE: {**{name: {} for name in names}, **entries}, GROUPS: groups}
    ShardedOptimizer.load_state_dict(optimizer, state_dict)


def unflattened(optimizer: ShardedOptimizer, flat: Mapping[str, Any], names_of: Mapping[Any, Any]) -> dict[str, Any]:
    """The state dict that was flattened into keys such as ``state.weight.exp_avg``, a group for each parameter.

    ``names_of`` gives for each parameter all names that it has in the model, of which one is in the flat dict.
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
    """Dicts in dicts, where keys have dots."""
    made: dict[str, Any] = {}
    for key, value in flat.items():
        *outer, last = key.split(".")
        inner = made
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return made


# The helpers' own functions, which ask those above where the optimizer is ours.


def _making_state(theirs: Function) -> Function:
    def init_optim_state(optim: Any) -> None:
        if not isinstance(optim, ShardedOptimizer):
            theirs(optim)

    return init_optim_state


def _asking(theirs: Function) -> Function:
    def state_dict_fn(obj: Any, api: str) -> Function:
        if not isinstance(obj, ShardedOptimizer):
            function: Function = theirs(obj, api)
            return function
        if api == "state_dict":
            return lambda: numbered(obj)
        return lambda state_dict: load_by_model_names(obj, state_dict)

    return state_dict_fn


def _unflattening(theirs: Function) -> Function:
    def unflatten_optim_state_dict(optim: Any, state_dict: Any, info: Any) -> Any:
        if isinstance(optim, ShardedOptimizer):
            return unflattened(optim, state_dict, info.fqn_param_mapping)
        return theirs(optim, state_dict, info)

    return unflatten_optim_state_dict


replace_when_loaded(HELPERS, "_init_optim_state", _making_state)
replace_when_loaded(HELPERS, "_state_dict_fn", _asking)
replace_when_loaded(HELPERS, "_unflatten_optim_state_dict", _unflattening)
