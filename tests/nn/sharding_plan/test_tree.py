"""Names in a module tree, and patterns for them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwise.nn.sharding_plan.tree import ModuleTree, is_pattern, matches

PARTS = st.lists(st.sampled_from(["a", "ab", "0", "weight"]), min_size=1, max_size=5)
PATTERNS = st.lists(st.sampled_from(["a", "a*", "*", "?", "[a0]", "**", "weight"]), min_size=1, max_size=5)
AS_REGEX = {"a*": r"a[^.]*", "*": r"[^.]+", "?": r"[^.]", "[a0]": "[a0]"}


def as_regex(parts: list[str]) -> str:
    """The same pattern in the words of `re`, over a name in which every part ends with a dot."""
    return "".join(r"(?:[^.]+\.)*" if part == "**" else AS_REGEX.get(part, part) + r"\." for part in parts)


@given(PATTERNS, PARTS)
def test_a_pattern_fits_part_by_part(pattern: list[str], parts: list[str]) -> None:
    """As a regular expression would, written out."""
    expected = re.fullmatch(as_regex(pattern), ".".join(parts) + ".") is not None
    assert matches(".".join(pattern), ".".join(parts)) == expected


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("layers.*.weight", "layers.10.weight", True),
        ("layers.*.weight", "layers.1.fc.weight", False),
        ("layers.*", "layers", False),
        ("**", "weight", True),
        ("**.weight", "a.b.weight", True),
        ("a.**.weight", "a.weight", True),
        ("*.weight", "weight", False),
        ("layers.[0-3].weight", "layers.2.weight", True),
        ("layers.[!0].weight", "layers.0.weight", False),
        ("fc?.bias", "fc10.bias", False),
        ("FC1.bias", "fc1.bias", False),
    ],
)
def test_patterns_in_examples(pattern: str, name: str, fits: bool) -> None:
    """A star ends at a dot, two of them do not."""
    assert matches(pattern, name) == fits


def test_what_is_a_pattern() -> None:
    """Three characters make one."""
    assert [name for name in ("a.b", "a*", "a?", "a[0]", "a]", "") if is_pattern(name)] == ["a*", "a?", "a[0]"]


def test_shared_things_have_all_their_names() -> None:
    """A tied parameter, and a module that is used twice."""
    shared = nn.Linear(2, 2)
    root = nn.ModuleDict({"first": shared, "second": shared, "third": nn.Linear(2, 2)})
    root["third"].weight = shared.weight
    tree = ModuleTree(root)
    assert tree.names_of_parameter("second.weight") == ["first.weight", "second.weight", "third.weight"]
    assert tree.names_of_parameter("second.bias") == ["first.bias", "second.bias"]
    assert tree.names_of_module("second") == ["first", "second"]
    places = tree.places(tree.names_of_parameter("first.weight"))
    assert [(place.owner, place.name) for place in places] == [(shared, "weight"), (root["third"], "weight")]
    assert [place.name for place in tree.parents(["first", "second"])] == ["first", "second"]
