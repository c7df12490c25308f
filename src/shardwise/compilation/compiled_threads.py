"""Threads that are within a function which torch has compiled with ``fullgraph=True``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

compiled_threads: set[int] = set()


@contextmanager
def outside_of_one_graph() -> Iterator[None]:
    """Within this context, ops on sharded tensors are computed though a function compiled with fullgraph=True runs."""
    thread = threading.get_ident()
    within = thread in compiled_threads
    compiled_threads.discard(thread)
    try:
        yield
    finally:
        if within:
            compiled_threads.add(thread)
