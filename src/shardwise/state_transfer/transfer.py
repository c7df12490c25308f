"""`StateTransfer`: a whole state from where it is to where it shall be, by one plan, as often as one likes."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Literal, overload

import torch
from torch.distributed import ProcessGroup

from shardwise.checkpoint.name_patterns import Rename
from shardwise.checkpoint.ranks import Ranks
from shardwise.comm.group import Fields
from shardwise.comm.transfer.copies import as_here
from shardwise.comm.transfer.rounds import Rounds
from shardwise.errors import PropertyError, TransferError
from shardwise.layout.pictures import Picture
from shardwise.layout.pictures.picture import WIDTH
from shardwise.state_transfer.delivery import Delivery
from shardwise.state_transfer.explaining import RATE, explained, pictured
from shardwise.state_transfer.jobs import OtherJob
from shardwise.state_transfer.meetings import GroupMeeting, TransferMeeting
from shardwise.state_transfer.memory import require_memory, require_unmoved
from shardwise.state_transfer.planning import OnArrival, Options, Planned, loaded, planned
from shardwise.state_transfer.recipe import Recipe
from shardwise.state_transfer.sides import State

MAX_BYTES = 256 * 2**20  # fewer rounds: each waits for all ranks that it sends to


def _in_order(recipe: Recipe | None) -> Recipe:
    """The same recipe on ranks that write it in another order; what is none is told later, on all ranks."""
    if isinstance(recipe, Mapping) and all(isinstance(name, str) for name in recipe):
        return dict(sorted(recipe.items()))
    return {} if recipe is None else recipe


def _told(version: int | None) -> Fields:
    """What ranks compare of it: what they are given. A run that fails on some may have gone well on others, where it
    counts."""
    return {} if version is None else {"version": version}


class TransferHandle:
    """A transfer under way, as ``run(wait=False)`` gives it."""

    def __init__(
        self, work: Callable[[], None], finish: Callable[[], None], failed: Callable[[], None], *, threaded: bool
    ) -> None:
        """Whoever waits finishes the work; and is told before the work's error is raised."""
        self._failed: Callable[[], None] | None = failed
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._finish: Callable[[], None] | None = finish
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, args=(work, as_here()), name="shardwise transfer")
            self._thread.start()
        else:
            try:
                work()
            except BaseException:  # not kept: an error that is kept keeps its frames, and they keep buffers and sockets
                failed()
                raise

    def _raise(self) -> None:
        """What went wrong, if something did."""
        if self._error is not None:
            failed, self._failed = self._failed, None
            if failed is not None:
                failed()
            raise self._error

    def _run(self, work: Callable[[], None], context: Callable[[], AbstractContextManager[object]]) -> None:
        try:
            with context():
                work()
        except BaseException as error:  # whoever waits raises it, also what would end a thread without a word
            self._error = error

    def done(self) -> bool:
        """Whether everything that this rank sends and gets has come and gone, or something went wrong."""
        return self._thread is None or not self._thread.is_alive()

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody has."""
        return self._finish is None

    def wait(self) -> None:
        """Return when everything is in its place here; raise what went wrong. Every rank calls it."""
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            finish, self._finish = self._finish, None
            self._raise()
            if finish is not None:
                try:
                    finish()
                except BaseException as error:
                    self._error, self._failed = error, None
                    raise


class StateTransfer:
    """A whole state on its way from one set of layouts to another: planned once, run as often as one likes.

    Source and target are mappings from names to sharded tensors, DTensors or plain tensors, or modules. They may lie on
    the same ranks, on other ranks of the same world, or overlap. Every rank of the group makes it, giving what it has
    of each side: a rank that has nothing of a side gives None, or an empty mapping; one may give a bare `Layout` for a
    tensor of which it has no box. A plain tensor is whole on each rank that gives it: any of them may send it, and each
    gets it. All is checked before anything moves, and all that is wrong is one error on every rank.

    A target is filled from the source of the same name, after ``rename`` (names or patterns of the source to those of
    the target, or a function). A ``recipe`` says what is made otherwise, in expressions of `shardwise.state_transfer`::

        {"layers.*.qkv.weight": cat("layers.*.q.weight", "layers.*.k.weight", "layers.*.v.weight")}

    With ``strict=False``, names that only one side has are left alone. Values are converted to the target's dtype, and
    travel in the narrower of both. Tied targets are filled once.

    Every element goes once to each rank that wants it and has it not, from itself if it can, else from a holder on the
    same host, else from all holders in equal parts. All tensors go together, packed in messages, so that packing,
    sending and unpacking overlap; buffers take ``max_bytes`` at most, and are kept for the next run.

    If a run fails in the middle, targets are partly filled; with ``staged``, what arrives is kept apart until all of it
    is there on all ranks, which takes as much memory again as the target. A rank that gives a bare layout of a target
    of which it is to have boxes gets them by ``on_arrival(name, boxes)``, a tensor at a time: to quantise it, say::

        >>> trained = {"q": shardwise.shard(torch.ones(4, 6), 0), "k": shardwise.shard(torch.zeros(2, 6), 0)}
        >>> served = {"qk": shardwise.zeros(1, 6, 6, dtype=torch.bfloat16)}
        >>> transfer = shardwise.StateTransfer(trained, served, recipe={"qk": shardwise.state_transfer.cat("q", "k")})
        >>> transfer.run()
        >>> served["qk"].full_tensor().sum(1)
        tensor([6., 6., 6., 6., 0., 0.], dtype=torch.bfloat16)
    """

    def __init__(
        self,
        source: State,
        target: State,
        *,
        rename: Rename = None,
        recipe: Recipe | None = None,
        max_bytes: int = MAX_BYTES,
        staged: bool = False,
        on_arrival: OnArrival | None = None,
        strict: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self._take(source, target, Options(rename, _in_order(recipe), max_bytes, strict, staged, on_arrival))
        self._begin(GroupMeeting(Ranks.of(process_group, "StateTransfer")))

    @classmethod
    def between(
        cls,
        source: State = None,
        target: State = None,
        *,
        address: str,
        name: str = "weights",
        timeout: float = 60.0,
        backend: str = "gloo",
        host: bool | None = None,
        rename: Rename = None,
        recipe: Recipe | None = None,
        max_bytes: int = MAX_BYTES,
        staged: bool = True,
        on_arrival: OnArrival | None = None,
        strict: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> StateTransfer:
        """A transfer from one job to another, which were started apart, each with a world of its own or none.

        One gives its source, and the other its target; all ranks of either job call it. They meet in a TCPStore::

            transfer = StateTransfer.between(source=model, address="10.0.0.1:29400")  # in the trainer
            transfer = StateTransfer.between(target=model, address="10.0.0.1:29400")  # in the engine

        The first rank of the source hosts the store, on the host that the address names; with ``host=True`` in the one
        job and ``host=False`` in the other that of the target does, and with ``host=False`` in both some other process.
        ``name`` tells several pairs of jobs in one store apart. Nobody is waited for here: the jobs meet when both
        `run`, exchange their layouts then, and keep to that plan until one of them is started anew.

        No wait for a rank of either job takes longer than ``timeout`` seconds, give or take a few. What arrives is kept
        in copies, which become the target when all ranks have all of it (``staged=False`` does without the copies: a
        transfer that breaks off then leaves part of the new values in the target). ``rename``, ``recipe``,
        ``max_bytes``, ``staged``, ``strict`` and ``backend`` are the same in both jobs.
        """
        transfer = cls.__new__(cls)
        transfer._take(source, target, Options(rename, _in_order(recipe), max_bytes, strict, staged, on_arrival))
        transfer._other = OtherJob(
            Ranks.of(process_group, "StateTransfer.between"),
            (source is not None, target is not None),
            address=address,
            name=name,
            timeout=timeout,
            backend=backend,
            host=host,
        )
        return transfer

    def _take(self, source: State, target: State, options: Options) -> None:
        self._options, self._states = options, (source, target)
        self._other: OtherJob | None = None
        self._under_way: TransferHandle | None = None
        self._lock = threading.Lock()
        self._mover: int | None = None  # the thread that moves it now
        self.version = 0

    def _begin(self, meeting: TransferMeeting) -> None:
        """Plan the transfer with the ranks of a meeting."""
        source, target = self._states
        require = partial(require_memory, here=meeting.here, options=self._options)
        draft = planned(meeting, source, target, self._options, require)
        if self._other is not None:
            said = {"plan (of rename and recipe)": draft.digest, "backend": self._other.backend}
            meeting.in_step(lambda: (None, said, b""))
        self._meeting, self._wire = meeting, meeting.wire(draft.device_types)
        self._known_as = meeting.in_step(lambda: self._prepare(draft))[1][0].hex()

    def _prepare(self, draft: Planned) -> tuple[None, Fields, bytes]:
        """What may fail on one rank alone, before anything is sent; and what tells transfers apart that are alike."""
        meeting, wire = self._meeting, self._wire
        self._planned = loaded(draft, meeting.here, meeting.size, self._options.max_bytes, wire.device)
        self._delivery = Delivery(self._planned, meeting.here, self._options)
        self._rounds = Rounds(
            self._planned.load,
            wire,
            self._planned.source_view(meeting.here),
            self._delivery.view,
            pinned=wire.device.type == "cpu" and "cuda" in draft.device_types_here,
            fixed=self._delivery.is_fixed,
        )
        self._rounds.prepare()
        self._delivery.prepare()
        is_first = meeting.here == meeting.everyone[0]
        return None, {"verb": "StateTransfer, buffers"}, uuid.uuid4().bytes if is_first else b""

    @overload
    def run(self, *, wait: Literal[False], version: int | None = None) -> TransferHandle: ...
    @overload
    def run(self, *, wait: bool = True, version: int | None = None) -> TransferHandle | None: ...
    def run(self, *, wait: bool = True, version: int | None = None) -> TransferHandle | None:
        """Move the state as it is now. Every rank calls it, of two jobs those of both.

        With ``wait=False`` it goes on in the background: neither side may be changed, nor the target be used, before
        ``wait()`` of the handle has returned. With NCCL it is in the current stream when it returns, in either case.

        `version` counts the runs that went well here; a source may give each a number of its own, which the target gets
        to know. A run goes well on all ranks or raises on all of them, and what it has moved until then stays moved,
        unless it is ``staged``. On a group of NCCL alone, a rank that has sent and got all its own returns also if
        another rank fails, and hears of that in its next call.

        Between jobs it waits for the other one to run, too. A `TransferError` says that it did not come in time, died
        or cannot be reached: then the target is as it was, on all of its ranks, and the next run meets anew whoever is
        there. A source that has lost its target does not wait for it again before there is a sign of it: until then
        each run raises at once. In the target ``wait=False`` receives while the old values are in use: when the handle
        is ``done()`` all has arrived, and its ``wait()`` puts it in place.
        """
        if self._mover == threading.get_ident():
            raise TransferError("run() was called by on_arrival, in the middle of a run of the same transfer")
        with self._lock:  # the buffers are those of one run; threads take turns
            earlier, self._under_way = self._under_way, None
            if earlier is not None and not earlier.is_waited_for:
                earlier.wait()
            handle = self._started(version, threaded=not wait)
            if not wait:
                self._under_way = handle
                return handle
            handle.wait()
            return None

    def _started(self, version: int | None, *, threaded: bool) -> TransferHandle:
        with self._wire.failing() if self._other is None else nullcontext():
            if version is not None and type(version) is not int:
                raise PropertyError(f"a version should be an int, not {version!r:.80}")
        given = self.version + 1 if version is None else version
        if self._other is None:
            self._wire.begin({"verb": "StateTransfer.run", "identity": self._known_as, **_told(version)})
        background = self._other is not None or self._wire.device.type == "cpu"
        return TransferHandle(
            lambda: self._carry(given),
            lambda: self._finish(given, _told(version)),
            (lambda: None) if self._other is not None else self._wire.end,
            threaded=threaded and background,
        )

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """A part of a run, in the thread that does it. The other ranks get to know also if it is interrupted."""
        self._mover = threading.get_ident()
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and self._other is None:
                self._wire.tell(self._interrupted(error))
            raise
        finally:
            self._mover = None

    def _interrupted(self, error: BaseException) -> TransferError:
        return TransferError(
            f"rank {self._meeting.ranks.here} was interrupted in the middle of a transfer, by {type(error).__name__}"
        )

    def _carry(self, version: int) -> None:
        with self._moving():
            if self._other is None:
                self._move()
            else:
                self._carry_between(self._other, version)

    def _carry_between(self, other: OtherJob, version: int) -> None:
        meeting, is_new = other.meet(version)
        try:
            if is_new:
                self._begin(meeting)
            self._move()
            meeting.agree()
        except BaseException as error:
            other_error = meeting.failed(error if isinstance(error, Exception) else self._interrupted(error))
            other.part()
            if not isinstance(error, Exception):
                raise
            try:
                raise other_error from error
            finally:
                del other_error  # an error in a frame of its own traceback is freed by nothing but a garbage collection
        other.went_well()

    def _move(self) -> None:
        # In this mode inference tensors can be written into, too, be they targets or buffers that were made in it.
        with torch.inference_mode(), self._wire.failing():
            require_unmoved(self._planned, *self._states)
            self._delivery.begin()
            self._rounds.run(self._delivery.arrived)
            self._wire.finish()

    def _finish(self, version: int, told: Fields) -> None:
        """In the thread that waits: ranks meet in the order in which they wait."""
        with self._moving():
            said = {"identity": self._known_as, **told}
            if self._other is None and self._options.staged:
                self._meeting.in_step(lambda: (None, {"verb": "StateTransfer, all arrived", **said}, b""))
            if self._planned.hands_over and (self._other is None or self._states[1] is not None):
                GroupMeeting(self._meeting.ranks).in_step(lambda: self._hand_over(said))
            self._delivery.finish()
        meeting = None if self._other is None else self._other.meeting
        self.version = version if meeting is None else meeting.terms.version

    def _hand_over(self, said: Fields) -> tuple[None, Fields, bytes]:
        """What is done with it may fail."""
        self._delivery.hand_over()
        return None, {"verb": "StateTransfer, all handed over", **said}, b""

    def poll(self) -> bool:
        """Whether the other job waits in `run` for this one, so that a run would begin at once. Between jobs only.

        Every rank of this job calls it, and gets the same answer; not while a run is under way in the background.
        """
        if self._other is None:
            raise TransferError(
                "poll() asks for another job: this transfer is between ranks of one, made by StateTransfer()"
            )
        return self._other.is_waiting()

    def close(self) -> None:
        """Leave the other job, and the store, for good. Between jobs only; a transfer that is dropped does it, too."""
        if self._other is not None:
            self._other.close()

    def explain(self, *, rate: float = RATE) -> str:
        """In plain words: how much moves against the least that must, the busiest link, and how long that takes if a
        link carries so many bytes a second. Between jobs, it is known when they have met."""
        if not rate > 0:
            raise PropertyError(f"a rate is in bytes a second, and more than 0; found {rate!r:.80}")
        self._require_met()
        return explained(self._planned, self._meeting.everyone, self._meeting.here, rate, self._meeting.who)

    def _picture_(self, *, dtype: object = None, width: int = WIDTH) -> Picture:
        """Of any dtype, in bytes."""
        self._require_met()
        return pictured(self._planned, self._meeting.everyone, self._meeting.here, width, self._meeting.who)

    def _require_met(self) -> None:
        if not hasattr(self, "_planned"):
            raise TransferError("the two jobs have not met yet: what will move is known after the first run()")

    def _repr_html_(self) -> str:
        return self._picture_().html()
