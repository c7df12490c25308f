"""`Checkpoints`: the numbered checkpoints of one training, of which the last ones are kept."""

from __future__ import annotations

import operator
import os
import re
import warnings
from contextlib import suppress
from typing import Any, SupportsIndex

from torch.distributed import ProcessGroup

from shardwise.checkpoint.archive.index_file import INDEX, OWN_FILE, index_text, parse_index
from shardwise.checkpoint.background import SaveHandle
from shardwise.checkpoint.generation import STALE_AFTER
from shardwise.checkpoint.loading import load
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.saving import save_then
from shardwise.checkpoint.storage import Storage, storage_at
from shardwise.comm.group import Fields
from shardwise.errors import CheckpointError, DamageError

NAME = re.compile(r"step-(\d{8,})")


class Checkpoints:
    """A folder of numbered checkpoints: ``step-00000100`` and so on, at a path or an address.

    ``keep`` of them are kept (None for all): when a new one is there, whole, older ones are removed. ``every`` so many
    steps one is saved; with ``wait=False`` in the background, where ``max_bytes`` bounds the copies. Whatever happens
    to a job, what is found afterwards is whole, and the last whole one is never removed::

        >>> import tempfile, torch, shardwise
        >>> model = torch.nn.Linear(2, 3)
        >>> checkpoints = shardwise.Checkpoints(tempfile.mkdtemp(), keep=2, every=10)
        >>> last = checkpoints.resume({"model": model})
        >>> for step in range(0 if last is None else last + 1, 41):
        ...     _ = checkpoints.save(step, {"model": model})
        >>> checkpoints.steps()
        [30, 40]
        >>> checkpoints.resume({"model": model})
        40

    Every rank of the group calls `save`, `load`, `resume` and `remove_after`; `steps` and `latest` only look.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | Storage,
        *,
        keep: int | None = 3,
        every: int = 1,
        wait: bool = True,
        max_bytes: int | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        if keep is not None and not _counts(keep, 1):
            raise CheckpointError(f"at least one checkpoint is kept, or None for all; found keep={keep!r}")
        if not _counts(every, 1):
            raise CheckpointError(f"a checkpoint is saved every so many steps, one at least; found every={every!r}")
        self.storage = storage_at(folder)
        self.keep, self.every = keep, every
        self._wait, self._max_bytes, self._group = wait, max_bytes, process_group
        self._handle: SaveHandle | None = None
        self._damaged: set[int] = set()  # steps whose checkpoint could not be loaded

    def __repr__(self) -> str:
        return f"Checkpoints('{self.storage}', keep={self.keep}, every={self.every})"

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    # Looking --------------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps with a whole checkpoint, in order."""
        return [step for step in self._numbered() if self._is_whole(step)]

    @property
    def latest(self) -> int | None:
        """The last step with a whole checkpoint, or None."""
        return next((step for step in reversed(self._numbered()) if self._is_whole(step)), None)

    def at(self, step: int) -> Storage:
        """The storage of the checkpoint of a step, for `shardwise.load` and `shardwise.verify`."""
        return self.storage.within(f"step-{step:08d}")

    def _numbered(self) -> list[int]:
        return sorted(int(found[1]) for name in self.storage.folders() if (found := NAME.fullmatch(name)))

    def _is_whole(self, step: int) -> bool:
        """Whether the index is valid and all its files exist."""
        place = self.at(step)
        with suppress(CheckpointError):
            return set(parse_index(index_text(place), place).files) <= set(place.names())
        return False

    # Saving ---------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Any, *, force: bool = False) -> bool:
        """Save a state at every ``every``-th step, or with ``force``; gives whether it does.

        Raises the error of the save before, if that was in the background and nobody has seen it.
        """
        if not _counts(step, 0):
            raise CheckpointError(f"steps are numbered by whole numbers from 0 on; found {step!r}")
        step = operator.index(step)
        if step % self.every and not force:
            return False
        ranks = Ranks.of(self._group, "Checkpoints.save")

        def check() -> tuple[None, Fields, None]:
            self.wait()
            later = [other for other in self._numbered() if other > step] if ranks.first else []
            later = [other for other in later if other not in self._damaged and self._is_whole(other)]
            if later:
                raise CheckpointError(
                    f"'{self.storage}' has checkpoints of later steps than {step}, such as {later[-1]}, from which the "
                    f"next run would resume: remove_after({step}) removes them; or save to another folder"
                )
            return None, {"step": step}, None

        ranks.in_step(check)
        self._handle = save_then(
            state,
            self.at(step),
            lambda: self._remove_old(step),
            wait=self._wait,
            max_bytes=self._max_bytes,
            process_group=self._group,
        )
        return True

    def wait(self) -> None:
        """Return when the last save is done; raise its error, on every rank, if it failed."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()

    def _remove_old(self, saved: int) -> None:
        """On the first rank, after a save: remove the checkpoints that are not kept."""
        self._damaged.discard(saved)  # the save has replaced a damaged one
        numbered = self._numbered()
        whole = [step for step in numbered if step != saved and step not in self._damaged and self._is_whole(step)]
        kept = {saved, *(whole if self.keep is None else whole[max(len(whole) - self.keep + 1, 0) :])}
        for step in numbered:
            if step in self._damaged or (step in whole and step not in kept) or (step not in whole and step < saved):
                with suppress(CheckpointError):  # the next save tries again
                    self._remove(step, half=step not in whole and step not in self._damaged)
        self._damaged.clear()

    def _remove(self, step: int, *, half: bool) -> None:
        """Remove a checkpoint, its index first, so that the rest is never taken for a checkpoint.

        ``half`` says that it has no valid index: another job may be writing it.
        """
        place = self.at(step)
        with place.writing() as alone:
            names = [name for name in place.names() if OWN_FILE.fullmatch(name)]
            if half and not alone and any(place.seconds_since(name) < STALE_AFTER for name in names):
                return
            place.remove([INDEX])
            place.remove(names)
        place.remove([])  # the folder, which held the lock

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of all later steps, so that training resumes from this one."""
        ranks = Ranks.of(self._group, "Checkpoints.remove_after")

        def work() -> tuple[None, Fields, None]:
            self.wait()
            if ranks.first:
                if not self._is_whole(step):
                    raise CheckpointError(f"{self._without(step)}; nothing was removed")
                for other in reversed(self._numbered()):
                    if other > step:
                        self._remove(other, half=False)
            return None, {"step": step}, None

        ranks.in_step(work)

    # Loading --------------------------------------------------------------------------------------------------------

    def load(self, state: Any, step: int | None = None, **options: Any) -> Any:
        """Fill a state from the checkpoint of a step, by default the latest. Options are those of `load`."""
        ranks = Ranks.of(self._group, "Checkpoints.load")

        def find() -> tuple[None, Fields, int | None]:
            self.wait()
            found = (self.latest if step is None else step) if ranks.first else None
            if ranks.first and (found is None or not self._is_whole(found)):
                raise CheckpointError(self._without(step))
            return None, {"step": step}, found

        found = ranks.in_step(find)[1][0]
        return load(state, self.at(found), process_group=self._group, **options)

    def resume(self, state: Any, **options: Any) -> int | None:
        """Fill a state from the latest checkpoint and give its step; None, without changes, if there is none.

        Skips a damaged checkpoint with a warning; the next save removes it.
        """
        ranks = Ranks.of(self._group, "Checkpoints.resume")

        def find() -> tuple[None, Fields, list[int] | None]:
            self.wait()
            return None, {}, self.steps() if ranks.first else None

        steps: list[int] = ranks.in_step(find)[1][0]
        for step in reversed(steps):
            try:
                load(state, self.at(step), process_group=self._group, **options)
            except DamageError as error:
                if step == steps[0]:
                    raise
                warnings.warn(f"the checkpoint of step {step} is left out: {error}", stacklevel=2)
                self._damaged.add(step)
            else:
                return step
        return None

    def _without(self, step: int | None) -> str:
        if step is None:
            return f"there is no whole checkpoint in '{self.storage}'"
        there = self.steps()
        return f"there is no whole checkpoint of step {step} in '{self.storage}'; there are {there or 'none'}"


def _counts(value: SupportsIndex, least: int) -> bool:
    """Whether a value is a whole number (also of numpy or in a tensor) of at least ``least``."""
    try:
        return operator.index(value) >= least
    except TypeError:
        return False
