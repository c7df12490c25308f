"""What happens when certain modules are imported while the drop-in is installed.

`torch.distributed._shard.checkpoint` is where `torch.distributed.checkpoint` used to be: the old name gives the module
of today. And two functions of torch outside the old system misjudge sharded tensors; ours are put in their place as
soon as their modules are there. One puts whole tensors together for a full state dict, and takes each to be cut into
even chunks of its first dim. The other prepares a state for a checkpoint, and forgets the tensors that a rank has no
shards of, which a load then takes for a sign of an old format.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch
from torch.distributed import ProcessGroup

from shardwise.dropin.modules import ROOT
from shardwise.sharded_tensor import ShardedTensor

MOVED = {f"{ROOT}.checkpoint": "torch.distributed.checkpoint"}


def gathering(theirs: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """What puts a sharded tensor together for a full state dict, however it is cut."""

    def gathered(
        sharded_tensor: ShardedTensor, pg: ProcessGroup | None = None, device: torch.device | None = None
    ) -> torch.Tensor:
        """The whole tensor on every rank of its own group, each of which calls it."""
        whole = sharded_tensor.full_tensor().detach()
        return whole if device is None else whole.to(device)

    return gathered


def flattening(theirs: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What prepares a state for a checkpoint, and keeps what this rank has no shards of."""

    def flattened(state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state, with sharded tensors in sharded tensors taken apart."""
        from torch.distributed.checkpoint._traverse import set_element, traverse_state_dict

        state = theirs(state_dict)

        def keep(path: Any, value: object) -> None:
            if isinstance(value, ShardedTensor) and not value._frame.rows:
                set_element(state, path, value)

        traverse_state_dict(state_dict, keep)
        return state

    return flattened


# By module and name, what makes our function from theirs.
REPLACED: dict[str, dict[str, Callable[..., Callable[..., Any]]]] = {
    "torch.distributed._state_dict_utils": {"_all_gather_sharded_tensor": gathering},
    "torch.distributed.checkpoint._sharded_tensor_utils": {"_flatten_sharded_tensors": flattening},
}


class Finder(MetaPathFinder):
    """Looks after the modules that are named in `MOVED` and `REPLACED`."""

    def __init__(self) -> None:
        self.theirs: dict[str, dict[str, Any]] = {}  # what was replaced, by module and name

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """For a module that has moved, one that gives the other; for one to be amended, its own with a last step."""
        for old, new in MOVED.items():
            if name == old or name.startswith(f"{old}."):
                return ModuleSpec(name, Moved(new + name.removeprefix(old)))
        if name not in REPLACED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader = spec.loader
            run = loader.exec_module

            def run_and_amend(module: ModuleType) -> None:
                run(module)
                self.amend(module)

            loader.exec_module = run_and_amend  # type: ignore[method-assign] # this loader loads nothing else
        return spec

    def amend(self, module: ModuleType) -> None:
        """Replace the functions, and keep those that were there."""
        makers = REPLACED[module.__name__]
        theirs = {name: vars(module)[name] for name in makers if name in vars(module)}  # not every torch has each
        self.theirs[module.__name__] = theirs
        vars(module).update({name: makers[name](function) for name, function in theirs.items()})


class Moved(Loader):
    """Gives a module that has another name today."""

    def __init__(self, name: str) -> None:
        self.name = name

    def create_module(self, spec: ModuleSpec) -> None:
        """An empty one, which is then left."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the other in its place, which is what the import gives then."""
        sys.modules[module.__name__] = importlib.import_module(self.name)


def start() -> None:
    """Begin to look after them, and end the watch of `startup/sitecustomize.py`, whose work is done."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not hasattr(finder, "installs_shardwise")]
    sys.meta_path.insert(0, Finder())


def stop() -> None:
    """Look after them no longer, and put back what was replaced."""
    for finder in [finder for finder in sys.meta_path if isinstance(finder, Finder)]:
        sys.meta_path.remove(finder)
        for name, theirs in finder.theirs.items():
            vars(sys.modules[name]).update(theirs)
