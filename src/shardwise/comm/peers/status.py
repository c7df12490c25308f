"""The status of ranks in the group's store: where they wait, and what one raised alone.

A rank that waits for long writes down its last calls and reads those of the ranks that it waits for. If they differ, or
one of them has raised an error alone, it gives a verdict. The first verdict of an epoch holds: every rank that looks
raises it, and begins the next epoch. That a rank is gone holds in all epochs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.comm.group import CallHistory, CallRecord, group_state, ranks_of, store_of
from shardwise.comm.peers.lost_ranks import loss
from shardwise.comm.peers.store_channel import StoreChannel
from shardwise.errors import PlainValueError, RankMismatchError, TransferError, same_kind

MOST_READ = 16  # ranks whose status is read at a time, of those that are waited for
LOOKS = 0.01  # seconds between two looks at how many ranks have come
NEWLINE = "\n"
PLAIN_VALUE = "is a plain tensor, which must be the same on every rank"  # in the name of a field with its values
COMPILED_UNIT = "compiled_unit"  # the call that runs a compiled graph, whose inputs are those that torch has found
E = TypeVar("E", bound=BaseException)
_choice = random.Random()  # of its own: looking must not change what users draw


def check_peers(process_group: ProcessGroup, peers: Sequence[int], call: CallMark | None = None) -> None:
    """Raise if it is known that these ranks, by their numbers in the group, will not come as they should.

    They are waited for in a call, whose epoch may be over: ranks that have begun it, too, bring it to its end.
    """
    if call is not None and call.epoch != group_state(process_group).history.epoch:
        _check_call(process_group, peers, call)
        return
    error = find_verdict(process_group, peers)
    if error is not None:
        end_epoch(process_group)
        raise error


class CallMark(NamedTuple):
    """Which call of a group's history sends data, the tag of the data, and in how many parts it is sent."""

    epoch: int
    number: int
    digest: bytes
    tag: int
    at_once: bool  # whether all of it is sent when the call begins, so that an error later keeps nothing back


def mark_of_call(history: CallHistory, *, at_once: bool) -> CallMark:
    """Of the last call, which sends data."""
    return CallMark(history.epoch, history.number - 1, history.digest, history.data_tag(), at_once)


def _check_call(process_group: ProcessGroup, peers: Sequence[int], call: CallMark) -> None:
    """Raise if one of these ranks will not bring a call of an epoch to its end that is over here."""
    lost, missed = None, not call.at_once
    with suppress(RuntimeError):  # a store that is gone knows nothing
        lost = find_loss(process_group)
        channel = epoch_channel(process_group, call.epoch)
        missed = missed or any(_has_missed(channel, rank, call) for rank in sampled(process_group, peers))
    if lost is not None:
        raise lost
    if missed:
        raise given_up()


def _has_missed(channel: StoreChannel, rank: int, call: CallMark) -> bool:
    """Whether a rank has not sent its data of a call, and will not."""
    state = channel.read(rank)
    if state is None:
        return False
    if state["number"] > call.number and not _has_begun(state["entries"], call, channel):
        return True
    return bool((state["is_over"] or state["failure"] is not None) and state["last_sent"] < call.number)


def _has_begun(theirs: dict[str, dict[str, Any]], call: CallMark, channel: StoreChannel) -> bool:
    """Whether a rank that has come further, with these last calls, has begun this call and no other in its place."""
    entry = theirs.get(str(call.number))
    if entry is not None:
        return bool(entry["digest"] == call.digest.hex())
    # That call is not kept any more. A digest covers all calls before, so a later call that is alike tells as much.
    mine = (channel.read(dist.get_rank()) or {}).get("entries", {})
    return any(number in theirs and theirs[number]["digest"] == one["digest"] for number, one in mine.items())


def end_epoch(process_group: ProcessGroup) -> None:
    """All ranks raise the same error, or have. Runs that go on are told how far this rank has come."""
    history = group_state(process_group).history
    with history.publishing:  # no other thread publishes in between, for it would publish the old epoch as the new one
        _write_status(process_group, is_over=True)
        history.begin_epoch()


def given_up() -> TransferError:
    """The error of data that will not come."""
    return TransferError("a transfer was under way when the ranks raised an error, and was given up: begin it again")


def find_verdict(process_group: ProcessGroup, peers: Sequence[int]) -> Exception | None:
    """The error that all ranks raise in this epoch, if there is cause for one. Says where this rank is."""
    history, channel = group_state(process_group).history, epoch_channel(process_group)
    with suppress(RuntimeError):  # a store that is gone knows nothing
        publish(process_group)
        whole = _group_channel(process_group)
        found = channel.decision()
        proposed = whole.read("loss") if found is None else None
        for rank in () if found is not None or proposed is not None else sampled(process_group, peers):
            theirs = channel.read(rank)
            proposed = None if theirs is None else _verdict(history, rank, theirs)
            if proposed is not None:
                # That rank may be elsewhere since it has found a loss, which it has written before it went on.
                proposed = whole.read("loss") or proposed
                break
        if proposed is not None:  # another rank may have decided something else meanwhile
            found = channel.decide(proposed)
        return None if found is None else error_of(found, ranks_of(process_group))
    return None


def sampled(process_group: ProcessGroup, peers: Sequence[int]) -> list[int]:
    """The global ranks whose status is read at a time, of these members of a group: all, or some of many."""
    ranks = ranks_of(process_group)
    others = sorted({ranks[peer] for peer in peers} - {dist.get_rank()})
    return others if len(others) <= MOST_READ else _choice.sample(others, MOST_READ)


def publish(process_group: ProcessGroup) -> None:
    """Write down where this rank is, unless that is written already."""
    with group_state(
        process_group
    ).history.publishing:  # one thread after the other: what is written last is the latest
        _write_status(process_group, is_over=False)


def _write_status(process_group: ProcessGroup, *, is_over: bool) -> None:
    """Write down where this rank is in its epoch, and whether the epoch is over."""
    history = group_state(process_group).history
    with suppress(RuntimeError):
        state = (history.epoch, history.number, history.last_sent, history.failure, is_over)
        if history.published != state:
            here = {
                "number": history.number,
                "last_sent": history.last_sent,
                "failure": history.failure,
                "entries": {entry.number: entry.described() for entry in tuple(history.entries)},
                "is_over": is_over,
            }
            epoch_channel(process_group, state[0]).write(dist.get_rank(), here)
            history.published = state


def notify_of_failure(process_group: ProcessGroup, error: Exception) -> None:
    """Let the others know that this rank raises an error that they may not find. Does not wait for anybody."""
    history = group_state(process_group).history
    if history.failure is None:
        history.failure = [type(error).__name__, str(error)]
        publish(process_group)
    mark_known(error, ranks_of(process_group))  # once, through however many calls it leaves


def loss_notice(what: str, error: Exception, process_group: ProcessGroup) -> TransferError:
    """The error of a rank that could not do this with the others, and who is gone.

    The others get a notice, for they may wait for this rank and not for the one that is gone. Who is gone does not come
    back, so that this notice holds in all epochs: whoever waits in the group from now on raises it.
    """
    found, is_gone = loss(what, error, process_group)
    if is_gone:
        notify_of_loss(process_group, found)
    else:
        notify_of_failure(process_group, found)
    return found


def notify_of_loss(process_group: ProcessGroup, error: Exception) -> None:
    """Let all who wait in the group from now on know that a rank is gone."""
    with suppress(RuntimeError):  # the store is gone, too
        _group_channel(process_group).write("loss", ["failure", dist.get_rank(), type(error).__name__, str(error)])
    mark_known(error, ranks_of(process_group))


def _verdict(history: CallHistory, rank: int, theirs: dict[str, Any]) -> list[Any] | None:
    """What follows from where another rank is: that it has failed, or this one, or that their calls differ."""
    if theirs["failure"] is not None:
        return ["failure", rank, *theirs["failure"]]
    if history.failure is not None:
        return ["failure", dist.get_rank(), *history.failure] if theirs["number"] > history.number else None
    return mismatch(tuple(history.entries), rank, theirs["entries"])


def mismatch(entries: Sequence[CallRecord], rank: int, there: dict[str, dict[str, Any]]) -> list[Any] | None:
    """The first call in which another rank was elsewhere than this one, if there is such a call.

    None where both ranks exchange headers in that call: the headers say more, however late a rank comes to them.
    """
    mine = {str(entry.number): entry for entry in entries}
    for number, entry in mine.items():  # in order
        if number in there and there[number]["digest"] != entry.digest.hex():
            if entry.meets and there[number]["meets"]:
                return None
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
        what = difference_of_fields(first, here["fields"], second, there["fields"])
        if PLAIN_VALUE in what:
            return f"{here['call']}{what}"
        text += what
        if _name(here) == COMPILED_UNIT and what:
            text += "; the graphs that torch has compiled differ between these ranks"
    if not still:
        text += f"; now rank {first} is in {now[0]['call']}, rank {second} in {now[1]['call']}"
    return text if known or not number else f"{text} (and they differ before, in calls that are not kept)"


def _place(entry: dict[str, Any]) -> str:
    """Where in the users' code a call is: a call may have several entries, as one of its transfer."""
    return str(entry["call"].partition(" (")[2] or entry["call"])


def _name(entry: dict[str, Any]) -> str:
    return str(entry["call"].partition(" (")[0])


def difference_of_fields(first: int, mine: dict[str, str], second: int, theirs: dict[str, str]) -> str:
    """The first of the fields that differ; what its name says after a colon is advice."""
    for name in [*mine, *theirs]:
        here, there = mine.get(name, "nothing"), theirs.get(name, "nothing")
        if here != there:
            name, _, advice = name.partition(": ")
            if name.endswith(PLAIN_VALUE) and "nothing" in (here, there):
                on, other = (second, first) if here == "nothing" else (first, second)
                return f": {name.removesuffix(PLAIN_VALUE)}is a plain tensor on rank {on}, but not on rank {other}"
            if name.endswith(PLAIN_VALUE):
                return f": {_plain_difference(name, first, here, second, there)}. {advice[0].upper()}{advice[1:]}"
            text = f": {name}={here} on rank {first}, {name}={there} on rank {second}"
            return f"{text}; {advice}" if advice else text
    return ""


def _plain_difference(name: str, first: int, here: str, second: int, there: str) -> str:
    """The same of a plain operand, of which a field tells size, dtype and something of the values."""
    sizes = [text[: text.index(")") + 1] for text in (here, there) if ")" in text]
    differs = f": it is {sizes[0]} on rank {first}, {sizes[1]} on rank {second}" if len(set(sizes)) > 1 else ""
    return f"{name}, but on rank {second} it differs from that on rank {first}{differs}"


def mismatch_error(text: str) -> RankMismatchError:
    """The error of ranks that are out of step."""
    return PlainValueError(text) if PLAIN_VALUE in text else RankMismatchError(text)


def error_of(verdict: list[Any], ranks: tuple[int, ...]) -> Exception:
    """That all these ranks raise for a verdict."""
    kind, *rest = verdict
    error = failure_of(*rest) if kind == "failure" else mismatch_error(rest[0])
    return mark_known(error, ranks)


def failure_of(rank: int, kind: str, message: str, others: str = "") -> Exception:
    """What every rank raises where some have failed."""
    return same_kind(kind, f"{message}\n(found on rank {rank}{others}; every rank of the group stops)")


def mark_known(error: E, ranks: tuple[int, ...]) -> E:
    """Note on an error that all these ranks know it."""
    error.known_to = ranks  # type: ignore[attr-defined] # whatever kind of error it is
    return error


def is_known(error: BaseException) -> bool:
    """Whether other ranks know the error: whoever catches it must raise it, and try nothing else."""
    return hasattr(error, "known_to")


# Groups whose messages have no tags ----------------------------------------------------------------------------------


def mark_unusable(process_group: ProcessGroup, error: Exception) -> None:
    """The ranks are out of step in collectives that cannot be called back: the group is of no use any more."""
    what = f"{type(error).__name__} ({str(error).strip().partition(NEWLINE)[0]})"
    group_state(process_group).history.broken = (
        f"the ranks are out of step since {what}, with collectives under way that do not end: "
        "this process group cannot be used any more"
    )


def wait_for_all(process_group: ProcessGroup, seconds: float) -> None:
    """Until all ranks of a group have come here in this epoch, or so many seconds are over."""
    end, channel = time.monotonic() + seconds, epoch_channel(process_group)
    with suppress(RuntimeError):  # a store that is gone knows nothing
        here = channel.add("ending", 1)
        while 0 < here < process_group.size() and time.monotonic() < end:
            time.sleep(LOOKS)
            here = channel.add("ending", 0)


def require_usable(process_group: ProcessGroup) -> CallHistory:
    """Raise what a watchdog has found; afterwards, that the group cannot be used. Gives this rank's history of it."""
    history = group_state(process_group).history
    if history.verdict is not None:
        error, history.verdict = history.verdict, None
        raise error
    if history.broken:
        raise TransferError(history.broken)
    return history


def _group_channel(process_group: ProcessGroup) -> StoreChannel:
    """What holds in all epochs of a group."""
    return StoreChannel(store_of(process_group), f"shardwise/{group_state(process_group).history.name}")


def epoch_channel(process_group: ProcessGroup, epoch: int | None = None) -> StoreChannel:
    """What the ranks write for each other in an epoch, by default in the current one."""
    history = group_state(process_group).history
    epoch = history.epoch if epoch is None else epoch
    return StoreChannel(store_of(process_group), f"shardwise/{history.name}/{epoch}")


def find_loss(process_group: ProcessGroup) -> Exception | None:
    """The error of ranks that are gone, if one of them has found some."""
    found = _group_channel(process_group).read("loss")
    return None if found is None else error_of(found, ranks_of(process_group))
