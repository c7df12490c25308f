"""Each rank's own batches, joined into batches of all ranks step by step, until no rank has any more.

Before each step the ranks tell each other in one small message whether they have a batch, and of which sizes. A rank
that has none takes part with tensors without rows: so every rank makes the same calls, and each sample counts once.

`join` is for users' loops, `joint_steps` for loaders of other libraries, `join_batch` for a single batch.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.distributed import ProcessGroup

from shardwise.comm.agreement import epoch_mark, in_step_sharing, in_step_telling, notify_of_leaving
from shardwise.comm.group import Fields, group_ranks, is_member, mesh_group, or_default
from shardwise.errors import ProcessGroupError, RankMismatchError, SpecError
from shardwise.tensor.batch_forms import BatchForm, Path, is_joinable, map_nest, path_text
from shardwise.tensor.from_local import from_local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
END: Any = object()  # instead of a batch, where a rank has no more


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
        self._batches, self._joiner = batches, _Joiner(dim, group, mesh)

    def __iter__(self) -> Iterator[T]:
        iterator, count, group = iter(self._batches), 0, self._joiner.group
        while (step := self._joiner.next(iterator)) is not None:
            count += 1
            mark, consumer = epoch_mark(group), id(sys._getframe(1))
            try:
                yield step.batch
            except GeneratorExit:
                if id(sys._getframe(1)) == consumer:  # and not the garbage collector, at any time
                    notify_of_leaving(group, _left_alone(count), mark)
                raise


@dataclass(frozen=True)
class JointStep:
    """One batch of all ranks, and whether it is the last."""

    batch: Any
    is_last: bool


def joint_steps(
    batches: Iterator[Any], group: ProcessGroup, *, is_last: Callable[[], bool], device: torch.device | str | None
) -> Iterator[JointStep]:
    """The batches of all ranks, joined along dim 0, for a loader that knows which of its batches is the last.

    Every rank of the group iterates. ``is_last`` says whether this rank's latest batch is its last one: the iterator is
    not asked for more then. A rank without a batch gets tensors without rows on ``device``.
    """
    joiner, step = _Joiner(0, group, None, device), None
    while step is None or not step.is_last:
        step = joiner.next(batches, is_last)
        if step is None:
            return
        yield step


class _Joiner:
    """Joins the next batches of the ranks of a group, as long as any rank has one."""

    def __init__(
        self,
        dim: int | Sequence[int | None],
        group: ProcessGroup,
        mesh: DeviceMesh | None,
        device: torch.device | str | None = None,
    ) -> None:
        self._dims, self.group, self._mesh, self._device = dim, group, mesh, device
        distinct = {one for one in ([dim] if isinstance(dim, int) else dim) if one is not None}
        if len(distinct) != 1:
            raise SpecError(f"join joins batches along one dim, found {dim!r}")
        self._dim: int = distinct.pop()
        self._has_ended = False
        self._forms: dict[str, BatchForm] = {}  # the forms that this rank knows, by digest
        self._knowing: dict[str, set[int]] = {}  # by digest, the group ranks that know the form

    def next(self, iterator: Iterator[Any], is_last: Callable[[], bool] = lambda: False) -> JointStep | None:
        """The next batch of all ranks; None if no rank has one. Every rank of the group calls it."""

        def work() -> tuple[tuple[Any, BatchForm] | None, Fields, list[Any] | None]:
            batch = END if self._has_ended else next(iterator, END)
            if batch is END:
                return None, {"verb": "join"}, None
            form = BatchForm.of(batch, self._dim)
            return (batch, form), {"verb": "join"}, [form.digest, *form.contents(batch), is_last()]

        mine, told = in_step_sharing(self.group, work)
        every: list[Any] = list(told)
        holders = [number for number, one in enumerate(every) if one is not None]
        if not holders:
            return None
        digest, first_shapes, first_values, _ = every[holders[0]]
        form = None if mine is None else mine[1]
        if any(every[number][0] != digest for number in holders):
            self._raise_different(form)
        self._share_form(digest, form, holders, len(every))
        shapes = [every[number][1] for number in holders]
        self._require_fitting(self._forms[digest], holders, shapes)
        if mine is None:
            batch = self._forms[digest].without_rows(first_shapes, first_values, self._dim, self._device)
        else:
            batch, self._has_ended = mine[0], every[self.group.rank() if len(every) > 1 else 0][3]
        sizes = [[0] * len(every) for _ in first_shapes]
        for number, of_rank in zip(holders, shapes, strict=True):
            for k, shape in enumerate(of_rank):
                sizes[k][number] = shape[self._dim]
        return JointStep(self._joined(batch, iter(sizes)), all(one is None or one[3] for one in every))

    def _share_form(self, digest: str, form: BatchForm | None, holders: list[int], count: int) -> None:
        """Send the form of the batches to the ranks that lack it. All ranks know which ranks do, and send alike."""
        knowing = self._knowing.setdefault(digest, set())
        if form is not None:
            self._forms.setdefault(digest, form)
        knowing.update(holders)
        if len(knowing) == count:
            return

        def work() -> tuple[None, Fields, bytes]:
            is_first = form is not None and self.group.rank() == holders[0]
            return None, {"verb": "join, form"}, pickle.dumps(form) if is_first else b""

        _, told = in_step_telling(self.group, work)
        self._forms.setdefault(digest, pickle.loads(list(told)[holders[0]]))  # from a rank of this very job
        knowing.update(range(count))

    def _raise_different(self, form: BatchForm | None) -> None:
        """Raise on all ranks how their batches differ."""

        def work() -> tuple[None, Fields, list[str] | None]:
            return None, {"verb": "join, forms"}, None if form is None else form.lines

        _, told = in_step_sharing(self.group, work)
        ranks = group_ranks(self.group)
        forms = [(ranks[number], lines) for number, lines in enumerate(told) if lines is not None]
        (one, mine), (other, theirs) = forms[0], next(each for each in forms if each[1] != forms[0][1])
        here = next((line for line in mine if line not in theirs), "nothing else")
        there = next((line for line in theirs if line not in mine), "nothing else")
        raise RankMismatchError(
            f"join: the ranks' batches are not alike: {here} on rank {one}, {there} on rank {other}"
        )

    def _require_fitting(self, form: BatchForm, holders: list[int], shapes: list[list[list[int]]]) -> None:
        """Raise, as all ranks do, if sizes differ along a dim that is not joined."""
        ranks = group_ranks(self.group)
        for k, (path, _) in enumerate(form.tensors):
            first = shapes[0][k]
            for number, of_rank in zip(holders, shapes, strict=True):
                for dim, (one, other) in enumerate(zip(first, of_rank[k], strict=True)):
                    if one != other and dim != self._dim % len(first):
                        raise RankMismatchError(
                            f"join: {path_text(path)} must have the same size along dim {dim}, which it is not joined "
                            f"along: {first} on rank {ranks[holders[0]]}, {of_rank[k]} on rank {ranks[number]}"
                        )

    def _joined(self, batch: Any, sizes: Iterator[list[int]]) -> Any:
        def change(value: Any, path: Path) -> Any:
            if not is_joinable(value):
                return value
            on_ranks = next(sizes)
            if self._mesh is not None:
                return from_local(value, self._dims, process_group=self.group, mesh=self._mesh)
            return from_local(value, self._dim, process_group=self.group, sizes=on_ranks)

        return map_nest(change, batch)


def join_batch(batch: Any, group: ProcessGroup) -> Any:
    """One batch of each rank, joined along dim 0; tensors without dims stay plain. Every rank of the group calls it."""
    return map_nest(lambda one, _: from_local(one, process_group=group) if is_joinable(one) else one, batch)


def _left_alone(count: int) -> RankMismatchError:
    return RankMismatchError(
        f"a rank has left its loop over shardwise.join after batch {count}, and the others go on: leave it on all "
        "ranks alike, or let it come to its end"
    )
