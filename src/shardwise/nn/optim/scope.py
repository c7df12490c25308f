"""The scope of an update of one element: that element, its whole parameter, or the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from shardwise.errors import OptimizerError

Scope = Literal["element", "tensor", "model"]

# The scopes of torch's own optimizers, from their source. No option of these changes them.
_BY_NAME: dict[str, Scope] = {
    **dict.fromkeys(("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam"), "element"),
    **dict.fromkeys(("Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"), "element"),
    "Adafactor": "tensor",  # factored moments, and the norm of the parameter
    "Muon": "tensor",  # orthogonal updates
    "LBFGS": "model",  # products of vectors of all parameters
}
TORCH = {getattr(torch.optim, name): scope for name, scope in _BY_NAME.items() if hasattr(torch.optim, name)}


@dataclass(frozen=True)
class UpdateScope:
    """An optimizer class together with what its update of one element looks at. For classes that are not torch's.

    ``"element"``: that element, its gradient and its state alone: shards are updated where they lie.
    ``"tensor"``: the whole parameter: each goes to one rank, is updated there, and comes back.
    ``"model"``: several parameters at once: every rank gets all of them, and all do the same.

    ::

        ShardedOptimizer(dict(model.named_parameters()), UpdateScope(Lion, "element"), lr=1e-4)
    """

    optimizer_class: type[torch.optim.Optimizer]
    scope: Scope

    def __post_init__(self) -> None:
        _require_class(self.optimizer_class)
        if self.scope not in get_args(Scope):
            raise OptimizerError(f"scope should be one of {', '.join(get_args(Scope))}, found {self.scope!r}")


def scope_of(optimizer_class: Any) -> tuple[type[torch.optim.Optimizer], Scope | None]:
    """The class itself, and its scope; None if unknown."""
    if isinstance(optimizer_class, UpdateScope):
        return optimizer_class.optimizer_class, optimizer_class.scope
    _require_class(optimizer_class)
    for kind in optimizer_class.__mro__:
        if kind in TORCH:
            return optimizer_class, TORCH[kind]
        if any(not name.startswith("__") for name in vars(kind)):
            break  # a subclass with methods may compute anything; a new constructor changes no update
    return optimizer_class, None


def undeclared(optimizer_class: type, name: str) -> OptimizerError:
    """The error for an optimizer of unknown scope."""
    kind = optimizer_class.__name__
    return OptimizerError(
        f"{kind} is not one of torch's own optimizers, so it is not known whether it may update the shards of "
        f"{name!r} one by one. Say what its update of an element looks at: UpdateScope({kind}, 'element') for that "
        f"element alone, UpdateScope({kind}, 'tensor') for the whole parameter, UpdateScope({kind}, 'model') for "
        "several parameters (from shardwise.nn.optim)"
    )


def _require_class(optimizer_class: Any) -> None:
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, torch.optim.Optimizer):
        raise OptimizerError(f"expected a class derived from torch.optim.Optimizer, found {optimizer_class!r:.100}")
