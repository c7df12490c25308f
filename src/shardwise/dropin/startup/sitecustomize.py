"""What a Python runs when it starts with this folder on its `PYTHONPATH`, as children of `shardwise.dropin` do.

It must be quick, for every Python runs it: shardwise, and with it torch, is imported when something imports
`torch.distributed._shard`, and not before. It stands in front of any other `sitecustomize`, and runs that one too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType

ROOT = "torch.distributed._shard"
AMENDED = ("torch.distributed._state_dict_utils", "torch.distributed.checkpoint._sharded_tensor_utils")
HERE = Path(__file__).resolve().parent


class FirstImport(MetaPathFinder):
    """Installs the drop-in when the old system is about to be imported, or a module that the drop-in amends."""

    installs_shardwise = True  # how the drop-in finds it in `sys.meta_path`, and ends it

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """For the old system's root: the module that the drop-in has put in its place; for others: as it finds them."""
        if name != ROOT and name not in AMENDED:
            return None
        install()
        return ModuleSpec(name, Installed(), is_package=True) if name == ROOT else find_spec(name)


class Installed(Loader):
    """Gives what is in `sys.modules` already."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module that was put there."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do."""


def install() -> None:
    """Install the drop-in, from where this file lies if shardwise is not on the path of this Python."""
    if PathFinder.find_spec("shardwise", sys.path) is None:
        sys.path.append(str(HERE.parents[2]))
    try:
        from shardwise import dropin

        dropin.install()
    except Exception as error:
        raise ImportError(
            f"shardwise could not take the place of {ROOT} in this process, as the one that started it asked for: "
            f"{error}. Take {HERE} out of PYTHONPATH to use torch's own",
            name=ROOT,
        ) from error


def run_next() -> None:
    """Run the `sitecustomize` that would have been found without this one."""
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, FirstImport())
    run_next()
