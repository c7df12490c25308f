"""`torch.compile` compiles what is around sharded tensors, and leaves them to run as they do without it.

What happens to a sharded tensor depends on layouts and on other ranks, and the graph is in its shards: nothing that
torch's tracer could follow. So it is told not to look into this package. Where it meets a sharded tensor it ends one
graph and begins another.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

RULES = "torch._dynamo.trace_rules"  # which functions are traced; torch offers no way to name one that is not loaded
PACKAGE = "shardwise"


class _WhenLoaded(MetaPathFinder):
    """Waits for torch's tracer, which takes seconds to import and is not needed by most, and tells it then."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders say of the tracer's rules, with a word to them at the end; of all else, nothing."""
        if fullname != RULES:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            load = loader.exec_module

            def load_and_tell(module: Any) -> None:
                load(module)
                module.add(PACKAGE)

            loader.exec_module = load_and_tell
        return spec


def leave_to_run() -> None:
    """Tell torch's tracer not to look into this package, now or when it is loaded."""
    rules: Any = sys.modules.get(RULES)
    if rules is not None:
        rules.add(PACKAGE)
    elif not any(isinstance(finder, _WhenLoaded) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenLoaded())


leave_to_run()
