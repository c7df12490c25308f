"""What ranks know of each other: status and failure notices in the store, heartbeats, lost ranks, the watchdog."""

from shardwise.comm.peers.background_run import BackgroundRun
from shardwise.comm.peers.heartbeats import Heartbeats
from shardwise.comm.peers.lost import raise_lost
from shardwise.comm.peers.lost_ranks import ranks_gone, who_is_gone
from shardwise.comm.peers.status import (
    COMPILED_UNIT,
    PLAIN_VALUE,
    CallMark,
    check_peers,
    difference,
    difference_of_fields,
    end_epoch,
    failure_of,
    find_verdict,
    given_up,
    is_known,
    mark_known,
    mark_of_call,
    mark_unusable,
    mismatch_error,
    notify_of_failure,
    require_usable,
)
from shardwise.comm.peers.store_channel import StoreChannel
from shardwise.comm.peers.watchdog import NOT_BEGUN, abort_group, wait_for_device, wait_until_unwatched, watch

__all__ = [
    "COMPILED_UNIT",
    "NOT_BEGUN",
    "PLAIN_VALUE",
    "BackgroundRun",
    "CallMark",
    "Heartbeats",
    "StoreChannel",
    "abort_group",
    "check_peers",
    "difference",
    "difference_of_fields",
    "end_epoch",
    "failure_of",
    "find_verdict",
    "given_up",
    "is_known",
    "mark_known",
    "mark_of_call",
    "mark_unusable",
    "mismatch_error",
    "notify_of_failure",
    "raise_lost",
    "ranks_gone",
    "require_usable",
    "wait_for_device",
    "wait_until_unwatched",
    "watch",
    "who_is_gone",
]
