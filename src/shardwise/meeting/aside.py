"""What ranks tell each other aside, through the group's store: where they wait, and what one raised alone.

A rank that waits for long writes down its last calls and reads those of the ranks that it waits for. If they differ, or
one of them has raised an error alone, it gives a verdict. The first verdict of an epoch holds: every rank that looks
raises it, and begins the next epoch. That a rank is gone holds in all epochs.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.errors import RankMismatchError, TransferError, same_kind
from shardwise.meeting.chain import Entry, Ledger, ledger_of
from shardwise.meeting.group import loss, ranks_of, store_of

MOST_READ = 16  # ranks whose word is read in one look, of those that are waited for
LOOKS = 0.01  # seconds between two looks at how many ranks have come
NEWLINE = "\n"
E = TypeVar("E", bound=BaseException)
_choice = random.Random()  # of its own: looking must not change what users draw


def look(process_group: ProcessGroup, peers: Sequence[int], epoch: int | None = None) -> None:
    """Raise if it is known that these ranks, by their numbers in the group, will not come as they should.

    They are waited for since an epoch, which may be over.
    """
    if epoch not in (None, ledger_of(process_group).epoch):
        raise given_up()
    error = find_verdict(process_group, peers)
    if error is not None:
        end_epoch(process_group)
        raise error


def end_epoch(process_group: ProcessGroup) -> None:
    """All ranks raise the same error, or have. Runs that go on are told how far this rank has come."""
    publish(process_group, is_over=True)
    ledger_of(process_group).begin_epoch()


def given_up() -> TransferError:
    """The error of data that will not come."""
    return TransferError("a transfer was under way when the ranks raised an error, and was given up: begin it again")


def find_verdict(process_group: ProcessGroup, peers: Sequence[int]) -> Exception | None:
    """The error that all ranks raise in this epoch, if there is cause for one. Says where this rank is."""
    ledger, store = ledger_of(process_group), store_of(process_group)
    with suppress(RuntimeError):  # a store that is gone knows nothing
        if store is None:
            return None
        publish(process_group)
        key, ranks = _key(ledger, "verdict"), ranks_of(process_group)
        for known in (key, _loss_key(ledger)):
            if store.check([known]):
                return error_of(json.loads(store.get(known)), ranks)
        others = sorted({ranks[peer] for peer in peers} - {dist.get_rank()})
        if len(others) > MOST_READ:
            others = _choice.sample(others, MOST_READ)
        for rank in others:
            if store.check([_key(ledger, rank)]):
                found = _verdict(ledger, rank, json.loads(store.get(_key(ledger, rank))))
                if found is not None:
                    return error_of(json.loads(store.compare_set(key, "", json.dumps(found))), ranks)
    return None


def publish(process_group: ProcessGroup, *, is_over: bool = False) -> None:
    """Write down where this rank is, unless that is written already; and whether its epoch is over."""
    ledger, store = ledger_of(process_group), store_of(process_group)
    with suppress(RuntimeError), ledger.publishing:  # one thread after the other: what is written last is the latest
        state = (ledger.epoch, ledger.number, ledger.failure, is_over)
        if store is not None and ledger.published != state:
            entries = {entry.number: entry.described() for entry in tuple(ledger.entries)}
            here = {"number": ledger.number, "failure": ledger.failure, "entries": entries, "is_over": is_over}
            store.set(_key(ledger, dist.get_rank()), json.dumps(here))
            ledger.published = state


def leave_word(process_group: ProcessGroup, error: Exception) -> None:
    """Let the others know that this rank raises an error that they may not find. Does not wait for anybody."""
    ledger = ledger_of(process_group)
    if ledger.failure is None:
        ledger.failure = [type(error).__name__, str(error)]
        publish(process_group)
    told_to(error, ranks_of(process_group))  # once, through however many calls it leaves


def told_of_loss(what: str, error: Exception, process_group: ProcessGroup) -> TransferError:
    """The error of a rank that could not do this with the others, and who is gone.

    They are left word, for they may wait for this rank and not for the one that is gone. Who is gone does not come
    back, so that this word holds in all epochs: whoever waits in the group from now on raises it.
    """
    found, is_gone = loss(what, error, process_group)
    if is_gone:
        leave_word_for_good(process_group, found)
    else:
        leave_word(process_group, found)
    return found


def leave_word_for_good(process_group: ProcessGroup, error: Exception) -> None:
    """Let all who wait in the group from now on know that a rank is gone."""
    store = store_of(process_group)
    with suppress(RuntimeError):  # the store is gone, too
        if store is not None:
            word = ["failure", dist.get_rank(), type(error).__name__, str(error)]
            store.set(_loss_key(ledger_of(process_group)), json.dumps(word))
    told_to(error, ranks_of(process_group))


def _verdict(ledger: Ledger, rank: int, theirs: dict[str, Any]) -> list[Any] | None:
    """What follows from where another rank is: that it has failed, or this one, or that their calls differ."""
    if theirs["failure"] is not None:
        return ["failure", rank, *theirs["failure"]]
    if ledger.failure is not None:
        return ["failure", dist.get_rank(), *ledger.failure] if theirs["number"] > ledger.number else None
    return mismatch(tuple(ledger.entries), rank, theirs["entries"])


def mismatch(entries: Sequence[Entry], rank: int, there: dict[str, dict[str, Any]]) -> list[Any] | None:
    """The first call in which another rank was elsewhere than this one, if there is such a call."""
    mine = {str(entry.number): entry for entry in entries}
    for number, entry in mine.items():  # in order
        if number in there and there[number]["digest"] != entry.digest.hex():
            here = {key: one.described() for key, one in mine.items()}
            pair = sorted([(dist.get_rank(), here), (rank, there)], key=lambda one: one[0])
            return ["mismatch", difference(int(number), *pair)]
    return None


History = tuple[int, dict[str, dict[str, Any]]]  # a rank, and its last calls by their numbers


def difference(number: int, one: History, other: History) -> str:
    """In which call two ranks are, where they should be in the same, and what differs."""
    (first, mine), (second, theirs) = one, other
    here, there = mine[str(number)], theirs[str(number)]
    now = [list(calls.values())[-1] for calls in (mine, theirs)]
    still = all(_place(one) == _place(call) for one, call in zip(now, (here, there), strict=True))
    known = str(number - 1) in mine and str(number - 1) in theirs
    verb = "is" if still else "was"
    text = f"ranks {first} and {second} are out of step: rank {first} {verb} in {here['call']}, "
    text += f"rank {second} in {there['call']}"
    if here["call"] == there["call"] or _name(here) == _name(there):
        text += _fields(first, here["fields"], second, there["fields"])
    if not still:
        text += f"; now rank {first} is in {now[0]['call']}, rank {second} in {now[1]['call']}"
    return text if known or not number else f"{text} (and they differ before, in calls that are not kept)"


def _place(entry: dict[str, Any]) -> str:
    """Where in the users' code a call is: a call may have several entries, as one of its transfer."""
    return str(entry["call"].partition(" (")[2] or entry["call"])


def _name(entry: dict[str, Any]) -> str:
    return str(entry["call"].partition(" (")[0])


def _fields(first: int, mine: dict[str, str], second: int, theirs: dict[str, str]) -> str:
    """The first of the fields that differ."""
    for name in [*mine, *theirs]:
        here, there = mine.get(name, "nothing"), theirs.get(name, "nothing")
        if here != there:
            return f": {name}={here} on rank {first}, {name}={there} on rank {second}"
    return ""


def error_of(verdict: list[Any], ranks: tuple[int, ...]) -> Exception:
    """That all these ranks raise for a verdict."""
    kind, *rest = verdict
    error = failure_of(*rest) if kind == "failure" else RankMismatchError(rest[0])
    return told_to(error, ranks)


def failure_of(rank: int, kind: str, message: str, others: str = "") -> Exception:
    """What every rank raises where some have failed."""
    return same_kind(kind, f"{message}\n(found on rank {rank}{others}; every rank of the group stops)")


def told_to(error: E, ranks: tuple[int, ...]) -> E:
    """Note on an error that all these ranks know it."""
    error.told_to = ranks  # type: ignore[attr-defined] # whatever kind of error it is
    return error


# Groups whose messages have no tags ----------------------------------------------------------------------------------


def break_off(process_group: ProcessGroup, error: Exception) -> None:
    """The ranks are out of step in collectives that cannot be called back: the group is of no use any more."""
    what = f"{type(error).__name__} ({str(error).strip().partition(NEWLINE)[0]})"
    ledger_of(process_group).broken = (
        f"the ranks are out of step since {what}, with collectives under way that do not end: "
        "this process group cannot be used any more"
    )


def wait_to_end(process_group: ProcessGroup, seconds: float) -> None:
    """Until all ranks of a group have come here in this epoch, or so many seconds are over."""
    ledger, store = ledger_of(process_group), store_of(process_group)
    end, key = time.monotonic() + seconds, _key(ledger, "ending")
    with suppress(RuntimeError):  # a store that is gone knows nothing
        here = 0 if store is None else store.add(key, 1)
        while store is not None and here < process_group.size() and time.monotonic() < end:
            time.sleep(LOOKS)
            here = store.add(key, 0)


def require_sound(process_group: ProcessGroup) -> Ledger:
    """Raise what a watchdog has found; afterwards, that the group cannot be used. Gives this rank's ledger of it."""
    ledger = ledger_of(process_group)
    if ledger.verdict is not None:
        error, ledger.verdict = ledger.verdict, None
        raise error
    if ledger.broken:
        raise TransferError(ledger.broken)
    return ledger


def _loss_key(ledger: Ledger) -> str:
    return f"shardwise/{ledger.name}/loss"


def _key(ledger: Ledger, of: object, epoch: int | None = None) -> str:
    return f"shardwise/{ledger.name}/{ledger.epoch if epoch is None else epoch}/{of}"


# For runs that go on beside the calls of a group, and may outlive an epoch ------------------------------------------


def find_loss(process_group: ProcessGroup) -> Exception | None:
    """The error of ranks that are gone, if one of them has found some."""
    found = _read(process_group, _loss_key(ledger_of(process_group)))
    return None if found is None else error_of(found, ranks_of(process_group))


def state_in(epoch: int, process_group: ProcessGroup, rank: int) -> dict[str, Any] | None:
    """Where a rank was in an epoch, as far as that rank has written it down."""
    state: dict[str, Any] | None = _read(process_group, _key(ledger_of(process_group), rank, epoch))
    return state


def verdict_in(epoch: int, process_group: ProcessGroup, proposed: list[Any] | None) -> list[Any] | None:
    """The verdict of an epoch: the proposed one, unless there is another; None if there is neither."""
    key, store = _key(ledger_of(process_group), "verdict", epoch), store_of(process_group)
    if proposed is not None and store is not None:
        return list(json.loads(store.compare_set(key, "", json.dumps(proposed))))
    found: list[Any] | None = _read(process_group, key)
    return found


def _read(process_group: ProcessGroup, key: str) -> Any:
    store = store_of(process_group)
    return json.loads(store.get(key)) if store is not None and store.check([key]) else None
