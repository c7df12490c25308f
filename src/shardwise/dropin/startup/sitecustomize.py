"""Python runs this file when it starts with this folder on its `PYTHONPATH`, as children of `shardwise.dropin` do.

The file must be quick: shardwise, and with it torch, is imported only when something imports
`torch.distributed._shard`. It hides any other `sitecustomize`, and runs that one too.
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

    installs_shardwise = True  # by which the drop-in finds and removes this finder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Install the drop-in; then the spec of its module, or the usual spec of an amended module."""
        if name != ROOT and name not in AMENDED:
            return None
        install_on_import()
        return ModuleSpec(name, Installed(), is_package=True) if name == ROOT else find_spec(name)


class Installed(Loader):
    """Gives the module in `sys.modules`."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module of that name."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


def install_on_import() -> None:
    """Install the drop-in; shardwise is found next to this file if it is not on the path."""
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
