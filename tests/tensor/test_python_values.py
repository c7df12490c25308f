"""What Python and numpy ask a tensor: values on every rank within the gather budget, or an error with a way out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.cases import ALL, PLAIN, chunks

import shardwise
from shardwise import gather_budget
from shardwise.errors import PropertyError, UnsupportedOpError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

ARRAYS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda tensor: tensor.numpy(),
    "numpy by force": lambda tensor: tensor.numpy(force=True),
    "asarray": np.asarray,
    "array of another type": lambda tensor: np.asarray(tensor, dtype="float64"),
    "__array__": lambda tensor: tensor.__array__(),
    "tolist": lambda tensor: tensor.tolist(),
}
NUMBERS: dict[str, Callable[[Any], Any]] = {
    "item": lambda tensor: tensor.item(),
    "float": float,
    "int": int,
    "bool": bool,
    "complex": complex,
    "floor": math.floor,
    "%": lambda tensor: f"{float(tensor):.2f}",
    "tolist": lambda tensor: tensor.tolist(),
}


@ranks(4)
def test_arrays_are_those_of_the_whole_tensor() -> None:
    """On every rank, whatever the layout."""
    for spec in ALL.values():
        tensor = shard_tensor(PLAIN, spec)
        for name, function in ARRAYS.items():
            found, expected = function(tensor), function(PLAIN)
            assert type(found) is type(expected), name
            np.testing.assert_array_equal(found, expected)


@ranks(2)
def test_a_tensor_that_requires_grad_is_no_array_as_in_torch() -> None:
    """`numpy` raises what torch raises; detached, or by force, it is one."""
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1)).requires_grad_()
    for function in (ARRAYS["numpy"], np.asarray):
        with pytest.raises(RuntimeError, match=r"requires grad. Use tensor.detach\(\).numpy\(\)"):
            function(tensor)
    assert np.array_equal(tensor.detach().numpy(), PLAIN)
    assert np.array_equal(tensor.numpy(force=True), PLAIN)
    assert tensor.tolist() == PLAIN.tolist()


@ranks(2)
def test_beyond_the_gather_budget_the_error_names_full_tensor() -> None:
    """On every rank, before anything is sent; the way out works."""
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1))
    for name, function in ARRAYS.items():
        with gather_budget(PLAIN.nbytes - 1), pytest.raises(UnsupportedOpError) as caught:
            function(tensor)
        assert f"Call full_tensor() first, or allow it with shardwise.gather_budget({PLAIN.nbytes})" in str(
            caught.value
        )
        with gather_budget(PLAIN.nbytes):
            np.testing.assert_array_equal(function(tensor), function(PLAIN), err_msg=name)
    assert np.array_equal(tensor.full_tensor().numpy(), PLAIN)


@ranks(2)
def test_one_element_is_a_number() -> None:
    """Wherever it lies, on every rank, without a budget; several elements are none, as in torch."""
    plain = PLAIN.sum()
    for tensor in (shard_tensor(PLAIN, chunks(0, 0, 1)).sum(), shard_tensor(plain.reshape(1, 1), chunks(0, 1, 0))):
        for name, function in NUMBERS.items():
            expected = plain.reshape(tensor.shape)
            with gather_budget(0):
                assert function(tensor) == function(expected), name
    for function in (float, int, bool, complex):
        for several in (PLAIN, shard_tensor(PLAIN, chunks(0, 0, 1))):
            with pytest.raises((ValueError, RuntimeError), match=r"one element|more than one value"):
                function(several)


@ranks(2)
def test_printing_sends_nothing() -> None:
    """Not even on one rank alone; a format of numbers needs a tensor without dims, which every rank formats."""
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1))
    with shardwise.trace() as trace:
        assert str(tensor) == repr(tensor) == f"{tensor}"
    assert not trace.events
    assert f"{tensor.sum():.3f}" == f"{PLAIN.sum():.3f}"
    with pytest.raises(PropertyError, match=r"formatted as '.2f': format item\(\).*full_tensor\(\)"):
        f"{tensor:.2f}"


@ranks(2)
def test_a_loop_gives_rows() -> None:
    """Each sharded; of very many rows, which would take minutes, it says what to do."""
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1))
    assert [row.tolist() for row in tensor] == PLAIN.tolist()
    with pytest.raises(TypeError, match="0-d tensor"):
        iter(tensor.sum())
    with pytest.raises(UnsupportedOpError, match=r"each of its 1,000,000 rows.*Loop over full_tensor\(\)"):
        for _ in shardwise.zeros(0, 1_000_000):
            pass
