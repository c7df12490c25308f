"""The backends of `torch.compile`, as it takes them: a name or a function, a mode and options."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from shardwise.compilation.full_graph.dynamic_sizes import DynamicSizes
from shardwise.compilation.full_graph.early_transfers import with_early_transfers
from shardwise.torch_private import load_private


def backend_of(
    backend: str | Callable[..., Any] = "inductor",
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
) -> Callable[..., Any]:
    """What compiles a graph of local tensors, given the graph and tensors without data in place of its inputs.

    Inductor compiles code for many sizes, unless ``dynamic`` is False. Other backends get each size by itself.
    """
    found: Callable[..., Any] = load_private("torch._dynamo.backends.registry.lookup_backend")(backend)
    if backend == "inductor":
        patches = {} if mode in (None, "default") else dict(load_private("torch._inductor.list_mode_options")(mode))
        patches.update({name.replace("-", "_"): value for name, value in (options or {}).items()})
        given: dict[str, Any] = {"config_patches": patches} if patches else {}
        compile = with_early_transfers(load_private("torch._inductor.compile_fx.compile_fx_inner"))
        given["inner_compile"] = compile if dynamic is False else DynamicSizes(compile)
        return partial(found, **given)
    given = {"mode": mode if mode != "default" else None, "options": options}
    return partial(found, **kept) if (kept := {name: one for name, one in given.items() if one}) else found
