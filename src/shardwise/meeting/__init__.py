"""Small messages between all ranks of a group, the chain of what each has done, and what they tell each other aside."""

from shardwise.meeting.aside import (
    break_off,
    difference,
    end_epoch,
    failure_of,
    find_verdict,
    given_up,
    leave_word,
    look,
    require_sound,
    told_to,
)
from shardwise.meeting.chain import DIGEST, Entry, Fields, Ledger, Said, begin_anew, ledger_of, put_away, traffic
from shardwise.meeting.exchange import HEADER, Gathering, Reduction, wait_for_data
from shardwise.meeting.group import (
    collective_device,
    is_large,
    is_tagged,
    listed,
    ranks_gone,
    ranks_of,
    store_of,
    who_is_gone,
)
from shardwise.meeting.lost import raise_lost
from shardwise.meeting.post import Look, Post, keeper
from shardwise.meeting.run import Run
from shardwise.meeting.watchdog import BEGINNING, end, watch

__all__ = [
    "BEGINNING",
    "DIGEST",
    "HEADER",
    "Entry",
    "Fields",
    "Gathering",
    "Ledger",
    "Look",
    "Post",
    "Reduction",
    "Run",
    "Said",
    "begin_anew",
    "break_off",
    "collective_device",
    "difference",
    "end",
    "end_epoch",
    "failure_of",
    "find_verdict",
    "given_up",
    "is_large",
    "is_tagged",
    "keeper",
    "leave_word",
    "ledger_of",
    "listed",
    "look",
    "put_away",
    "raise_lost",
    "ranks_gone",
    "ranks_of",
    "require_sound",
    "store_of",
    "told_to",
    "traffic",
    "wait_for_data",
    "watch",
    "who_is_gone",
]
