"""How all tests run: Hypothesis makes the same examples every time, and takes its time on a busy machine."""

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

# Files that take longest: whoever has one of them last would keep all others waiting.
FIRST = ("tests/models", "tests/test_examples.py", "tests/ops/test_matrix.py", "tests/ops", "tests/nn/optim")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with them, file by file."""

    def place(item: pytest.Item) -> int:
        return next((k for k, name in enumerate(FIRST) if item.nodeid.startswith(name)), len(FIRST))

    items.sort(key=place)
