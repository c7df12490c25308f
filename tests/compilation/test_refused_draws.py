"""Random numbers of Python and numpy in full graphs: refused, for a graph would always have the same ones."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import numpy
import pytest
from tests.compilation.test_guards import X, one_graph, sharded
from torch import nn

import shardwise
from shardwise.errors import UnsupportedOpError
from shardwise.testing import ranks


def draws_of_python(x: Any) -> Any:
    """Depends on a number of Python's."""
    return x * random.random()


def draws_of_numpy(x: Any) -> Any:
    """Depends on a number of numpy's."""
    return x * float(numpy.random.rand())


OWN = {"Random": random.Random(0), "Generator": numpy.random.default_rng(0), "RandomState": numpy.random.RandomState(0)}


def of_closure(generator: Any) -> Any:
    """A function with the generator in a dict of its closure, and no more arguments."""
    kept = {"own": generator}
    return lambda x: x * kept["own"].uniform(0, 1), ()


def of_argument(generator: Any) -> Any:
    """A function of the generator."""
    return lambda x, given: x * given.uniform(0, 1), (generator,)


@pytest.mark.parametrize("way", [of_closure, of_argument])
@ranks(2)
def test_generators_of_ones_own_are_refused(way: Any) -> None:
    """Those of Python and of numpy that the call finds; they are as they were."""
    for name, generator in OWN.items():
        before, (function, args) = copy.deepcopy(generator), way(generator)
        with pytest.raises(UnsupportedOpError, match=f"draws numbers of a `{name}`"):
            one_graph(function)(shardwise.ones(0, 4), *args)
        assert generator.uniform(0, 1) == before.uniform(0, 1)


class Keeps(nn.Module):
    """Has a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(0)

    def forward(self, x: Any) -> Any:
        """The argument, times a number that is drawn."""
        return x * self.generator.random()


@ranks(2)
def test_generators_of_modules_are_refused() -> None:
    """As all random numbers of Python."""
    with pytest.raises(UnsupportedOpError, match="draws numbers of a `Random`"):
        one_graph(sharded(Keeps()))(X)


@pytest.mark.parametrize(("drawing", "name"), [(draws_of_python, "`random`"), (draws_of_numpy, "`numpy.random`")])
@ranks(2)
def test_random_numbers_of_python_and_numpy_are_refused(drawing: Any, name: str) -> None:
    """On every rank, and the generators are as they were."""
    before = random.getstate(), pickle.dumps(numpy.random.get_state())
    with pytest.raises(UnsupportedOpError, match=f"draws numbers of {name}.*give the number as an argument"):
        one_graph(drawing)(shardwise.ones(0, 4))
    assert before == (random.getstate(), pickle.dumps(numpy.random.get_state()))
