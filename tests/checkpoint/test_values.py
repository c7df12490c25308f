"""Plain values and how they are nested: what is read is what was written, down to types and bits."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise
from shardwise.checkpoint.archive import state_json, state_tree
from shardwise.errors import CheckpointError

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=())),  # lone surrogates too
    st.binary(),
    st.binary().map(bytearray),
)
KEYS = st.one_of(st.text(), st.integers())
NESTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(KEYS, inner), st.dictionaries(KEYS, inner)
    ),
)


def no_content(owner: Any, path: state_tree.Path) -> Any:
    """There are no objects in these nests."""
    raise AssertionError(owner)


def exactly(value: Any) -> Any:
    """A form in which two values are equal only if they are the same in type and bits."""
    if isinstance(value, dict):
        return "dict", [(type(key), key, exactly(inner)) for key, inner in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [exactly(inner) for inner in value]
    if isinstance(value, float):
        return float, struct.pack("d", value)
    if isinstance(value, complex):
        return complex, exactly(value.real), exactly(value.imag)
    return type(value), value


@given(NESTS)
def test_values_come_back_exactly(value: Any) -> None:
    """Through text that any reader of JSON takes: nan, -0.0, huge ints, bytes, tuples, keys that are ints."""
    text = json.dumps(state_json.encode_tree(state_tree.parse_state(value, no_content), str), allow_nan=False)
    assert exactly(state_json.decode_tree(json.loads(text), {})) == exactly(value)


@pytest.mark.parametrize(
    "words",
    [
        [1],
        {},
        {"dict": 3},
        {"dict": [["a"]]},
        {"dict": [["a", 1], ["a", 2]]},
        {"dict": [[1.5, 1]]},
        {"dict": [[True, 1]]},
        {"list": "ab"},
        {"float": "00"},
        {"float": "xyz"},
        {"int": "zz"},
        {"bytes": "*"},
        {"tensor": "not there"},
        {"tensor": [1]},
        {"object": "x"},
        {"list": [], "tuple": []},
    ],
)
def test_words_that_nobody_wrote_are_refused(words: Any) -> None:
    """By an error of ours, whatever it is."""
    with pytest.raises(CheckpointError, match=r"is not a|stands for no value"):
        state_json.decode_tree(words, {})


class Point(NamedTuple):
    """A named tuple."""

    x: Any
    y: Any


def test_values_take_the_place_of_those_in_the_state(tmp_path: Path) -> None:
    """Dicts and lists stay the same objects; tuples are made anew, named ones of their kind."""
    saved = {
        "step": 7,
        "loss": float("nan"),
        "history": [1, 2.0, (3, "x")],
        5: {"point": Point(1, 2)},
        "pair": (8, [9]),
    }
    shardwise.save(saved, tmp_path)
    history: list[Any] = []
    inner: dict[str, Any] = {"point": Point(0, 0)}
    state = {"step": None, "loss": 0, "history": history, 5: inner, "pair": (0, [0])}
    assert shardwise.load(state, tmp_path) is state
    assert exactly(state) == exactly(saved)
    assert state["history"] is history
    assert state[5] is inner
    assert type(inner["point"]) is Point


@pytest.mark.parametrize("value", [3, "text \udc80", None, (1, 2.5), b"\x00\xff", torch.arange(3)], ids=repr)
def test_a_state_may_be_a_single_value_or_tensor(tmp_path: Path, value: Any) -> None:
    """What is not changed in place is returned."""
    shardwise.save(value, tmp_path)
    loaded = shardwise.load(torch.zeros_like(value) if isinstance(value, torch.Tensor) else None, tmp_path)
    assert torch.equal(loaded, value) if isinstance(value, torch.Tensor) else exactly(loaded) == exactly(value)


def test_names_that_read_the_same_stay_apart(tmp_path: Path) -> None:
    """Keys 1 and "1", strokes in keys, keys that look like boxes, and the one that safetensors keeps for itself."""
    names: list[Any] = [1, "1", "a/b", "w", "w[0:1]", "__metadata__", "", "ä\n'\""]
    saved: dict[Any, Any] = {name: torch.full((2,), float(number)) for number, name in enumerate(names)}
    saved["a"] = {"b": torch.full((2,), 99.0)}
    shardwise.save(saved, tmp_path)
    target: dict[Any, Any] = {name: torch.zeros(2) for name in names}
    target["a"] = {"b": torch.zeros(2)}
    shardwise.load(target, tmp_path)
    assert all(torch.equal(target[name], saved[name]) for name in names)
    assert torch.equal(target["a"]["b"], saved["a"]["b"])


@pytest.mark.parametrize(
    ("state", "fragment"),
    [
        ({"a": {"b": {1, 2}}}, "'a/b' is a builtins.set"),
        ({"f": torch.relu}, "'f' is a"),
        ({"a": {(1, 2): 3}}, "'a' has a key"),
        ({True: 3}, "keys are str or int"),
        ([torch.empty(3, device="meta")], "'0' is a tensor on the meta device"),
        ({"s": torch.eye(3).to_sparse()}, "'s' is a tensor of layout torch.sparse_coo"),
        ({"n": torch.zeros(3).numpy()}, "'n' is a numpy.ndarray"),
    ],
    ids=["set", "function", "tuple key", "bool key", "meta", "sparse", "array"],
)
def test_what_a_checkpoint_cannot_hold_is_named(tmp_path: Path, state: Any, fragment: str) -> None:
    """And nothing is written."""
    with pytest.raises(CheckpointError, match=fragment):
        shardwise.save(state, tmp_path / "deep" / "checkpoint")
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_contains_itself_is_refused(tmp_path: Path) -> None:
    """Rather than followed for ever."""
    state: dict[str, Any] = {"inner": {}}
    state["inner"]["outer"] = state
    with pytest.raises(CheckpointError, match="'inner/outer' contains itself"):
        shardwise.save(state, tmp_path)
