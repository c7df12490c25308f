"""The language of recipes, without processes: expressions against torch on real tensors, and what `resolve` says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from tests.state_transfer.expressions import Case, cases

from shardwise.errors import RecipeError
from shardwise.state_transfer import Expression, cat, interleave, pad, stack, take
from shardwise.state_transfer.patches import Patch
from shardwise.state_transfer.recipe import resolve


def put(patches: list[Patch], sources: dict[str, torch.Tensor], size: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """What patches make of zeros, and how often each element was written."""
    result, count = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.int64)
    for patch in patches:
        assert patch.source is not None
        box = sources[patch.source][tuple(slice(o, o + s) for o, s in zip(patch.offsets, patch.sizes, strict=True))]
        assert tuple(box.shape) == patch.sizes
        named = [dim for dim in patch.dims if dim is not None]
        unnamed = [dim for dim in range(box.ndim) if dim not in named]
        assert all(patch.sizes[dim] == 1 for dim in unnamed)
        view = box.permute([*named, *unnamed]).reshape(patch.extents)
        place = tuple(slice(a, a + e) for a, e in zip(patch.at, patch.extents, strict=True))
        result[place] = view
        count[place] += 1
    return result, count


@settings(max_examples=300, deadline=None)
@given(cases())
def test_patches_make_what_torch_makes(case: Case) -> None:
    """Random expressions: sizes and values are equal, patches and gaps cover each element once, reprs are code."""
    expression = case.expression
    assert isinstance(expression, Expression)
    size = expression.size(case.sizes)
    assert isinstance(size, torch.Size)
    assert size == case.tensor.shape
    patches = expression.patches(case.sizes)
    made, count = put(patches, case.sources, size)
    assert torch.equal(made, case.tensor)
    for at, extents in expression.gaps(case.sizes):
        count[tuple(slice(a, a + e) for a, e in zip(at, extents, strict=True))] += 1
    assert (count == 1).all()
    assert {patch.source for patch in patches} <= expression.sources <= case.sizes.keys()
    names = {"take": take, "cat": cat, "stack": stack, "interleave": interleave, "pad": pad}
    again = eval(repr(expression), names)
    assert again == expression
    assert hash(again) == hash(expression)
    assert not any(None in patch.dims for patch in patches if len(patch.dims) <= len(patch.sizes))


def test_pieces_that_are_one_box_again_are_one_patch() -> None:
    """What undoes itself is one patch: fused by heads and taken apart, stacked rows, dims made two and one again."""
    sizes = {"q": (32, 5), "k": (8, 5), "v": (8, 5), "x": (4, 6)}
    fused = interleave("q", "k", "v", groups=8)
    assert len(fused.patches(sizes)) == 24
    q = Patch("q", (0, 0), (32, 5), (0, 1), (0, 0))
    assert fused.part(0, of=(4, 1, 1), groups=8).patches(sizes) == [q]
    assert cat("q", "k").part(0, of=(4, 1)).patches(sizes) == take("q").patches(sizes) == [q]
    x = take("x")
    whole = x.patches(sizes)
    assert stack(*(x[row] for row in range(4))).patches(sizes) == whole
    assert stack(*(x[:, column] for column in range(6)), dim=1).patches(sizes) == whole
    assert stack(*(x[:, column] for column in range(6))).patches(sizes) == x.T.patches(sizes)
    assert x.unflatten(0, (2, 2)).flatten(0, 1).patches(sizes) == whole
    assert x.flatten().unflatten(0, (4, 6)).patches(sizes) == whole
    assert cat(x[:, :2], x[:, 2:], dim=1)[1:3].patches(sizes) == [Patch("x", (1, 0), (2, 6), (0, 1), (0, 0))]
    assert pad(pad("x", 8), 9, dim=1).gaps(sizes) == [((0, 6), (8, 3)), ((4, 0), (4, 6))]


def layers(*names: str, count: int = 2) -> dict[str, tuple[int, ...]]:
    """Sizes of weights in several layers."""
    return {f"layers.{k}.{name}": (4, 3) for k in range(count) for name in names}


def test_stars_and_numbers_stand_for_what_they_matched() -> None:
    """Fused and stacked there and back, over layers and experts in numeric order, with the rest renamed."""
    experts = [f"experts.{k}.{name}" for k in range(11) for name in ("gate", "up")]
    apart = {**layers("q", "k", *experts), "embed": (5, 3), "old.norm": (3,)}
    fused = {f"layers.{k}.{name}": size for k in range(2) for name, size in {"qk": (8, 3), "gu": (11, 8, 3)}.items()}
    fused |= {"tokens": (7, 3), "new.norm": (3,)}
    recipe = {
        "layers.*.qk": cat("layers.*.q", "layers.*.k"),
        "layers.#.gu": stack(cat("layers.#.experts.#.gate", "layers.#.experts.#.up")),
        "tokens": pad("embed", 7),
    }
    made = resolve(recipe, {"old.*": "new.*"}, apart, fused)
    assert list(made) == list(fused)
    assert made["layers.1.qk"] == cat("layers.1.q", "layers.1.k")
    pairs = [cat(f"layers.1.experts.{k}.gate", f"layers.1.experts.{k}.up") for k in range(11)]
    assert made["layers.1.gu"] == stack(*pairs)
    assert made["new.norm"] == take("old.norm")
    back = {
        "layers.*.q": take("layers.*.qk")[:4],
        "layers.*.k": take("layers.*.qk").part(1, of=(1, 1)),
        "layers.*.experts.#.gate": take("layers.*.gu")["#", :4],
        "layers.*.experts.#.up": take("layers.*.gu")["#"][4:],
        "embed": take("tokens")[:5],
        "layers.0.k": take("layers.0.qk")[4:],  # a whole name goes before a pattern
    }
    unmade = resolve(back, lambda name: name.replace("new", "old"), fused, apart)
    assert unmade["layers.1.experts.10.up"] == take("layers.1.gu")[10][4:]
    assert unmade["layers.0.k"] == take("layers.0.qk")[4:]
    values = {name: torch.rand(size, dtype=torch.float64) for name, size in apart.items()}
    there = {name: put(made[name].patches(apart), values, torch.Size(size))[0] for name, size in fused.items()}
    for name, size in apart.items():
        assert torch.equal(put(unmade[name].patches(fused), there, torch.Size(size))[0], values[name])


def test_all_problems_are_in_one_error() -> None:
    """Whatever is wrong is said at once, each with names and sizes, and nothing is said twice."""
    sources = {
        **layers("q", "k", "experts.0.up", "experts.1.up"),
        "a": (4, 3),
        "b": (4, 2),
        "odd": (5, 3),
        "left": (1,),
    }
    targets = {**layers("qk", "up"), "cat": (8, 3), "even": (9, 3), "size": (4, 4), "same": (2,), "b": (2, 4)}
    targets |= {"index": (3,), "nothing": (2,), "stack": (2, 4, 3), "one": (1,), "kind": (1,)}
    recipe: dict[str, Any] = {
        "layers.*.qk": cat("layers.*.q", "layers.*.key"),
        "layers.*.up": cat("layers.*.experts.#.up"),
        "layers.1.*": "layers.1.q",
        "cat": cat("a", "b"),
        "even": interleave("odd", "a", groups=2),
        "size": take("a").T,
        "index": cat(take("a")[7], take("a")["#"], take("b").part(0, of=(2, 1))),
        "same": cat(take("a")[7], take("b").T.part(0, of=(2, 1)), take("left").T, pad("left", 0)),
        "stack": stack("experts.#.down"),
        "one": "x.*",
        "kind": ["a", "b"],
        "typo": "left",
    }
    with pytest.raises(RecipeError) as caught:
        resolve(recipe, None, sources, targets)
    problems = caught.value.problems
    text = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert len(set(problems)) == len(problems)
    for expected in (
        "'layers.0.qk' is made of 'layers.0.key', but no source has such a name; did you mean 'layers.0.k'",
        "'layers.1.qk' is made of 'layers.1.key'",
        "'layers.0.up' is made of 'layers.0.experts.#.up', but # runs over all numbers only inside of stack()",
        "'layers.*.qk' and 'layers.1.*' of the recipe both make 'layers.1.qk'",
        "cat('a', 'b'): its parts should be of one size except in dim 0, but take('a') is of size (4, 3) and "
        "take('b') of size (4, 2)",
        "dim 0 should divide evenly into 2 groups, but take('odd') is of size (5, 3)",
        "the target 'size' is of size (4, 4), but take('a').T of size (3, 4)",
        "the target 'b' is of size (2, 4), but the source 'b' of size (4, 2)",
        "'index': take('a')['#'] wants a number, but there is no # in the name of the target",
        "take('a')[7]: index 7 is out of range, but take('a') is of size (4, 3)",
        "dim 0 should divide evenly into 3 shares, but take('b').T is of size (2, 4)",
        ".T is for two dims, .mT and .transpose for more, but take('left') is of size (1,)",
        "dim 0 should be at most 0, but take('left') is of size (1,)",
        "'stack' is made of 'experts.#.down', but no source has such a name",
        "'one': 'x.*' has more stars than the name of the target",
        "'kind': ['a', 'b'] is neither the name of a source nor an expression",
        "the recipe makes 'typo', but no target has such a name",
        "nothing makes the target 'nothing'",
        "no target is made of the source 'layers.0.k'; strict=False leaves it",
    ):
        assert expected in text
    assert "the source 'left'" not in text  # an entry takes it, although to a wrong name
    assert len(problems) == 22, text
    many = {f"w{k}": (1,) for k in range(30)}
    with pytest.raises(RecipeError) as caught:
        resolve({"all": stack("w#")}, None, many, {"all": (31, 1)})
    assert "(31, 1), but stack('w0', 'w1'," in str(caught.value)
    assert "'w29') of size (30, 1)" in str(caught.value)
    assert len(str(caught.value)) < 300
    with pytest.raises(RecipeError, match="and 10 more targets that nothing makes"):
        resolve(None, None, {}, many)
    with pytest.raises(RecipeError, match="'a' and 'b' are both renamed to 'c'"):
        resolve(None, {"a": "c", "b": "c"}, {"a": (1,), "b": (1,)}, {"c": (1,)})


def test_what_is_left_over_may_be() -> None:
    """With strict=False, targets that nothing makes are left out and sources may be unused; no more than that."""
    sources, targets = {"a": (2,), "b": (3,)}, {"a": (2,), "c": (3,)}
    assert resolve(None, None, sources, targets, strict=False) == {"a": take("a")}
    with pytest.raises(RecipeError, match="is made of 'x', but no source has such a name"):
        resolve({"c": "x"}, None, sources, targets, strict=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: take("a")[::2], "has step 1, not 2"),
        (lambda: take("a")[[0, 1]], "an index in a recipe is an integer"),
        (lambda: take("a")[True], "an index in a recipe is an integer"),
        (lambda: take("a")[..., 0, ...], "at most one"),
        (lambda: cat(), "at least one name"),
        (lambda: cat(["a", "b"]), "neither the name of a source nor an expression"),
        (lambda: take(""), "wants the name of a source"),
        (lambda: interleave("a", groups=0), "groups in a recipe is at least 1"),
        (lambda: take("a").part(0, of=(1, 0)), "a share in a recipe is at least 1"),
        (lambda: take("a").size({}), "there is no source 'a'"),
        (lambda: take("a")[0, 0, 0].size({"a": (2, 2)}), "at least 3 dims"),
        (lambda: take("a").unflatten(0, (3, -1)).size({"a": (2, 2)}), "made up of"),
        (lambda: take("a").unflatten(0, ()).size({"a": (2, 2)}), "there should be sizes"),
        (lambda: take("a").flatten(1, 0).size({"a": (2, 2)}), "should not come behind"),
        (lambda: take("a").part(2, of=(1, 1)).size({"a": (2, 2)}), "no part 2"),
        (lambda: stack("a", "a", dim=4).size({"a": (2, 2)}), "there should be a dim 4, but there are 3"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    """As soon as it is known: most of it when the expression is written."""
    with pytest.raises(RecipeError, match=message):
        make()


def test_expressions_are_no_sequences() -> None:
    """An index would be tried for ever."""
    with pytest.raises(TypeError):
        list(take("a"))  # type: ignore[call-overload] # that is the point
