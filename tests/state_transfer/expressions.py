"""Random expressions of recipes, beside what torch makes of the same sources: every element has a number of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from shardwise.state_transfer import Expression, cat, interleave, pad, stack, take


@dataclass
class Case:
    """An expression beside the tensor that torch makes of the same sources."""

    sources: dict[str, torch.Tensor]
    expression: Expression | str
    tensor: torch.Tensor

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """As recipes know the sources."""
        return {name: tuple(tensor.shape) for name, tensor in self.sources.items()}


sizes_of_dims = st.sampled_from([0, 1, 1, 2, 2, 3, 4, 6])


def made(
    draw: st.DrawFn, size: tuple[int, ...], depth: int, state: dict[str, torch.Tensor]
) -> tuple[Expression | str, torch.Tensor]:
    """An expression and a tensor of this size, in any of the ways that make one."""
    ndim = len(size)
    ways = ["source"]
    if depth:
        ways += ["unsqueezed", "int", *(["cut"] * (ndim > 0)), *(["cat", "pad", "part", "unflatten"] * (ndim > 0))]
        ways += ["transpose", "flatten"] * (ndim > 1) + ["stack"] * (ndim > 0 and max(size) > 0)
        ways += ["interleave"] * (ndim > 0) + ["T"] * (ndim == 2) + ["again"] * bool(state)
    way = draw(st.sampled_from(ways))
    dim = draw(st.integers(0, ndim - 1)) if ndim else 0
    spelled = dim - ndim if draw(st.booleans()) else dim  # dims may be counted from the end

    def inner(*new: int) -> tuple[Expression, torch.Tensor]:
        expression, tensor = made(draw, tuple(new), depth - 1, state)
        return (take(expression) if isinstance(expression, str) else expression), tensor

    def other(number: int) -> tuple[int, ...]:
        return (*size[:dim], number, *size[dim + 1 :])

    if way == "again":  # a source that is in it already, as it is of its size or not at all
        fitting = [name for name, tensor in state.items() if tensor.shape == size]
        if fitting:
            return fitting[0], state[fitting[0]]
    if way == "unsqueezed" and 1 in size:
        dim = size.index(1)
        e, t = inner(*size[:dim], *size[dim + 1 :])
        index = (*[slice(None)] * dim, None)
        return e[index], t[index]
    if way == "int":
        at, length = draw(st.integers(0, ndim)), draw(st.integers(1, 3))
        e, t = inner(*size[:at], length, *size[at:])
        number = draw(st.integers(-length, length - 1))
        index = (*[slice(None)] * at, number, ...)
        return e[index], t[index]
    if way == "cut":
        before, behind = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        e, t = inner(*other(before + size[dim] + behind))
        end = draw(st.sampled_from([-behind, before + size[dim]])) if behind else None
        cut = slice(before or None, end)
        index = (*[slice(None)] * dim, cut) if draw(st.booleans()) else (..., cut, *[slice(None)] * (ndim - dim - 1))
        return e[index], t[index]
    if way == "cat":
        at = draw(st.integers(0, size[dim]))
        (e, t), (f, u) = inner(*other(at)), inner(*other(size[dim] - at))
        return cat(e, f, dim=spelled), torch.cat([t, u], dim)
    if way == "stack" and size[dim]:
        parts = [inner(*size[:dim], *size[dim + 1 :]) for _ in range(size[dim])]
        return stack(*(e for e, _ in parts), dim=spelled), torch.stack([t for _, t in parts], dim)
    if way == "pad":
        e, t = inner(*other(draw(st.integers(0, size[dim]))))
        zeros = t.new_zeros(other(size[dim] - t.shape[dim]))
        return pad(e, size[dim], dim=spelled), torch.cat([t, zeros], dim)
    if way == "transpose":
        second = draw(st.integers(0, ndim - 1))
        turned = list(size)
        turned[dim], turned[second] = size[second], size[dim]
        e, t = inner(*turned)
        return e.transpose(spelled, second), t.transpose(dim, second)
    if way == "T":
        e, t = inner(size[1], size[0])
        return (e.T, t.T) if draw(st.booleans()) else (e.mT, t.mT)
    if way == "flatten":
        factors = [f for f in range(1, size[0] + 1) if size[0] % f == 0]
        first = draw(st.sampled_from(factors or [1]))
        e, t = inner(first, size[0] // first, *size[1:])
        return e.flatten(0, 1), t.flatten(0, 1)
    if way == "unflatten" and ndim > 1 and dim + 1 < ndim and size[dim]:
        e, t = inner(*size[:dim], size[dim] * size[dim + 1], *size[dim + 2 :])
        return e.unflatten(dim, (size[dim], -1)), t.unflatten(dim, (size[dim], size[dim + 1]))
    if way == "interleave" and size[dim] >= 2:
        groups = draw(st.sampled_from([g for g in range(1, size[dim] + 1) if size[dim] % g == 0]))
        rows = size[dim] // groups
        at = draw(st.integers(0, rows))
        (e, t), (f, u) = inner(*other(groups * at)), inner(*other(groups * (rows - at)))
        cut = [x.tensor_split(groups, dim) for x in (t, u)]
        return interleave(e, f, groups=groups, dim=spelled), torch.cat([x[g] for g in range(groups) for x in cut], dim)
    if way == "part":
        groups = draw(st.sampled_from([g for g in (1, 2, 3) if size[dim] % g == 0]))
        rows = size[dim] // groups
        share = draw(st.sampled_from([s for s in (1, 2) if rows % s == 0]))
        unit = rows // share
        shares = [draw(st.integers(1, 2)), share, draw(st.integers(1, 2))]
        e, t = inner(*other(groups * unit * sum(shares)))
        pieces = [group.split([unit * s for s in shares], dim)[1] for group in t.tensor_split(groups, dim)]
        return e.part(1, of=shares, groups=groups, dim=spelled), torch.cat(pieces, dim)
    name = f"s{len(state)}"
    begin = 1 + sum(tensor.numel() for tensor in state.values())
    state[name] = torch.arange(begin, begin + torch.Size(size).numel(), dtype=torch.float64).reshape(size)
    return name, state[name]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A random expression of random sources."""
    size = tuple(draw(st.lists(sizes_of_dims, max_size=3)))
    sources: dict[str, torch.Tensor] = {}
    expression, tensor = made(draw, size, draw(st.integers(0, 4)), sources)
    return Case(sources, take(expression) if isinstance(expression, str) else expression, tensor)
