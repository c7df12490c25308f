"""`join`: each rank's own batches, as batches of all ranks, until no rank has any more.

Before each batch the ranks tell each other in one small message whether they have one, and of which sizes. A rank that
has none takes part with tensors without rows: so every rank makes the same calls, and each sample counts.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.distributed import ProcessGroup

from shardwise.dispatch import Distributed
from shardwise.errors import ProcessGroupError, RankMismatchError, SpecError
from shardwise.mesh_group import mesh_group
from shardwise.process_group import (
    Fields,
    group_ranks,
    in_step_sharing,
    in_step_telling,
    is_member,
    leaves_together,
    mark_of,
    or_default,
)
from shardwise.sharded_tensor.from_local import from_local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
Path = tuple[Any, ...]


def join(
    batches: Iterable[T],
    dim: int | Sequence[int | None] = 0,
    *,
    process_group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
) -> JoinedBatches[T]:
    """Each rank's own batches, joined with those of the other ranks; goes on until all ranks have come to their end.

    Every rank of the group iterates over it, with batches of its own: tensors, or tuples, lists and mappings of them.
    Each tensor becomes one sharded tensor over all ranks, as by `from_local`, which also says what ``dim`` and ``mesh``
    are. A rank that has no more batches gets tensors without rows, also if it has had none at all. So ranks may have
    different numbers of batches and of rows, and a loss over a batch is the loss of all samples in it::

        >>> mine = [torch.ones(4, 8), torch.ones(3, 8)][dist.get_rank() :]  # one batch on rank 1, two on rank 0
        >>> [batch.shape[0] for batch in shardwise.join(mine)]
        [7, 3]

    Numbers, strings and tensors without dims stay as they are; a rank without a batch gets those of the first rank that
    has one. Of any other value it gets None, of a list without tensors an empty one. One small message travels for each
    batch, and nothing of its data. Tensors that do not fit together, and an error of a data loader, are raised on all
    ranks. A rank that leaves the loop alone, by a break, a return or an exception, is an error on the others within
    seconds. It can be iterated over again, for the next epoch.
    """
    group = or_default(process_group) if mesh is None else mesh_group(mesh, process_group)
    if not is_member(group):
        raise ProcessGroupError("join joins the batches of a group's ranks, and this rank is not in the group")
    return JoinedBatches(batches, dim, group, mesh)


class JoinedBatches(Generic[T]):
    """Batches of all ranks, as `join` gives them."""

    def __init__(
        self, batches: Iterable[T], dim: int | Sequence[int | None], group: ProcessGroup, mesh: DeviceMesh | None
    ) -> None:
        self._batches, self._dim, self._group, self._mesh = batches, dim, group, mesh
        joined = {one for one in ([dim] if isinstance(dim, int) else dim) if one is not None}
        if len(joined) != 1:
            raise SpecError(f"join joins batches along one dim, found {dim!r}")
        self._joined: int = joined.pop()
        self._forms: dict[str, _Form] = {}  # by digest: those that this rank knows
        self._known: dict[str, set[int]] = {}  # by digest, the ranks that know the form, by number in the group

    def __iter__(self) -> Iterator[T]:
        iterator, count = iter(self._batches), 0
        while True:
            batch = self._next(iterator)
            if batch is None:
                return
            count += 1
            mark, consumer = mark_of(self._group), id(sys._getframe(1))
            try:
                yield batch[0]
            except GeneratorExit:
                if id(sys._getframe(1)) == consumer:  # and not the garbage collector, whenever it comes
                    leaves_together(self._group, _has_left(count), mark)
                raise

    def _next(self, iterator: Iterator[T]) -> tuple[T] | None:
        """The next batch of all ranks; None if no rank has one."""

        def work() -> tuple[tuple[T, _Form] | None, Fields, list[Any] | None]:
            try:
                batch = next(iterator)
            except StopIteration:
                return None, {"verb": "join"}, None
            form = _Form.of(batch, self._joined)
            return (batch, form), {"verb": "join"}, [form.digest, *form.told(batch)]

        mine, told = in_step_sharing(self._group, work)
        every: list[Any] = list(told)
        have = [number for number, one in enumerate(every) if one is not None]
        if not have:
            return None
        digest, first = every[have[0]][0], have[0]
        form = None if mine is None else mine[1]
        if any(every[number][0] != digest for number in have):
            self._raise_different(form)
        self._learn(digest, form, have, len(every))
        shapes = [every[number][1] for number in have]
        self._require_fitting(self._forms[digest], have, shapes)
        if mine is None:
            batch = self._forms[digest].without_rows(every[first][1], every[first][2], self._joined)
        else:
            batch = mine[0]
        sizes = [[0] * len(every) for _ in shapes[0]]
        for number, each in zip(have, shapes, strict=True):
            for k, shape in enumerate(each):
                sizes[k][number] = shape[self._joined]
        return (self._joined_batch(batch, iter(sizes)),)

    def _learn(self, digest: str, form: _Form | None, have: list[int], count: int) -> None:
        """Have the form of the batches known where it is needed. All ranks know who knows it, and send alike."""
        known = self._known.setdefault(digest, set())
        if form is not None:
            self._forms.setdefault(digest, form)
        known.update(have)
        if all(number in known for number in range(count)):
            return

        def work() -> tuple[None, Fields, bytes]:
            is_first = form is not None and self._group.rank() == have[0]
            return None, {"verb": "join, form"}, pickle.dumps(form) if is_first else b""

        _, told = in_step_telling(self._group, work)
        self._forms.setdefault(digest, pickle.loads(list(told)[have[0]]))  # what a rank of this very job has told
        known.update(range(count))

    def _raise_different(self, form: _Form | None) -> None:
        """Raise on all ranks what differs in their batches."""

        def work() -> tuple[None, Fields, list[str] | None]:
            return None, {"verb": "join, forms"}, None if form is None else form.lines

        _, told = in_step_sharing(self._group, work)
        ranks = group_ranks(self._group)
        forms = [(ranks[number], lines) for number, lines in enumerate(told) if lines is not None]
        (one, mine), (other, theirs) = forms[0], next(each for each in forms if each[1] != forms[0][1])
        here = next((line for line in mine if line not in theirs), "nothing else")
        there = next((line for line in theirs if line not in mine), "nothing else")
        raise RankMismatchError(
            f"join: the ranks' batches are not alike: {here} on rank {one}, {there} on rank {other}"
        )

    def _require_fitting(self, form: _Form, have: list[int], shapes: list[list[list[int]]]) -> None:
        """Raise, as all ranks do, if sizes differ along a dim that is not joined."""
        ranks = group_ranks(self._group)
        for k, (path, _) in enumerate(form.tensors):
            first = shapes[0][k]
            for number, each in zip(have, shapes, strict=True):
                for dim, (one, other) in enumerate(zip(first, each[k], strict=True)):
                    if one != other and dim != self._joined % len(first):
                        raise RankMismatchError(
                            f"join: {_named(path)} must have the same size along dim {dim}, which it is not joined "
                            f"along: {first} on rank {ranks[have[0]]}, {each[k]} on rank {ranks[number]}"
                        )

    def _joined_batch(self, batch: Any, sizes: Iterator[list[int]]) -> Any:
        def change(value: Any, path: Path) -> Any:
            if not _is_joined(value):
                return value
            mine = next(sizes)
            if self._mesh is not None:
                return from_local(value, self._dim, process_group=self._group, mesh=self._mesh)
            return from_local(value, self._joined, process_group=self._group, sizes=mine)

        return _mapped(change, batch)


# Forms ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Blank:
    """A tensor of a batch, without its size; or a value."""

    dtype: torch.dtype | None = None
    device_type: str = ""
    ndim: int = 0
    requires_grad: bool = False
    is_value: bool = False  # a number or a string, which is told with each batch

    def __str__(self) -> str:
        if self.dtype is None:
            return "a value"
        wants = ", which requires grad" if self.requires_grad else ""
        return f"a tensor of {self.ndim} dims, {self.dtype}, on {self.device_type}{wants}"


@dataclass(frozen=True)
class _Form:
    """What batches have in common: how they are nested, and which tensors there are."""

    nest: Any  # the batch, with `_Blank` for tensors and values, and nothing for the rest
    digest: str
    lines: list[str]  # in words

    @staticmethod
    def of(batch: Any, joined: int) -> _Form:
        """That of a batch."""

        def blank(value: Any, path: Path) -> Any:
            if isinstance(value, torch.Tensor):
                if _is_joined(value) and not -value.ndim <= joined < value.ndim:
                    raise SpecError(f"join cannot join {_named(path)}, of {value.ndim} dims, along dim {joined}")
                wants = value.requires_grad and torch.is_grad_enabled()
                return _Blank(value.dtype, value.device.type, value.ndim, wants, is_value=not value.ndim)
            if value is None or isinstance(value, bool | int | float | str):
                return _Blank(is_value=True)
            return type(value)() if isinstance(value, list | tuple) else None

        nest = _mapped(blank, batch)
        lines = [f"{_named(path)} is {one}" for path, one in _leaves(nest) if isinstance(one, _Blank)]
        return _Form(nest, hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest(), lines)

    @property
    def tensors(self) -> list[tuple[Path, _Blank]]:
        """Those that are joined."""
        return [(path, one) for path, one in _leaves(self.nest) if isinstance(one, _Blank) and not one.is_value]

    def told(self, batch: Any) -> tuple[list[list[int]], list[Any]]:
        """The shapes of a batch's tensors, and its values."""
        leaves = [one for _, one in _leaves(batch)]
        values = [one.item() if isinstance(one, torch.Tensor) else one for one in leaves if _is_value(one)]
        return [list(one.shape) for one in leaves if _is_joined(one)], values

    def without_rows(self, shapes: Sequence[Sequence[int]], values: Sequence[Any], joined: int) -> Any:
        """A batch of this form, with nothing along the joined dim, and these values."""
        shape_of, value_of = iter(shapes), iter(values)

        def fill(one: Any, path: Path) -> Any:
            if not isinstance(one, _Blank):
                return one
            if one.is_value:
                value = next(value_of)
                return value if one.dtype is None else torch.tensor(value, dtype=one.dtype, device=one.device_type)
            shape = list(next(shape_of))
            shape[joined] = 0
            return torch.empty(shape, dtype=one.dtype, device=one.device_type, requires_grad=one.requires_grad)

        return _mapped(fill, self.nest)


def _is_joined(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, Distributed) and value.ndim > 0


def _is_value(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.ndim and not isinstance(value, Distributed)
    return value is None or isinstance(value, bool | int | float | str)


def _mapped(change: Callable[[Any, Path], Any], value: Any, path: Path = ()) -> Any:
    """The same nest of tuples, lists and mappings, with its ends changed; a list without tensors is an end."""
    if isinstance(value, list | tuple) and _has_tensors(value):
        items = [_mapped(change, item, (*path, k)) for k, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        changed = {key: _mapped(change, item, (*path, key)) for key, item in value.items()}
        return changed if type(value) is dict else type(value)(changed)  # type: ignore[call-arg] # as mappings are made
    return change(value, path)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_tensors, value))
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    return isinstance(value, torch.Tensor | _Blank)


def _leaves(nest: Any) -> list[tuple[Path, Any]]:
    found: list[tuple[Path, Any]] = []
    _mapped(lambda value, path: found.append((path, value)), nest)
    return found


def _named(path: Path) -> str:
    return "batch" + "".join(f"[{key!r}]" for key in path)


def _has_left(count: int) -> RankMismatchError:
    return RankMismatchError(
        f"a rank has left its loop over shardwise.join after batch {count}, and the others go on: leave it on all "
        "ranks alike, or let it come to its end"
    )
