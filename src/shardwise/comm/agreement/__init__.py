"""Calls in which all ranks of a group agree, or fail together: `steps` are the calls, `meeting` is how they agree."""

from shardwise.comm.agreement.headers import room
from shardwise.comm.agreement.meeting import settle
from shardwise.comm.agreement.small_messages import Gathering, wait_for_data
from shardwise.comm.agreement.steps import (
    Step,
    begin_sending,
    check,
    epoch_mark,
    in_op,
    in_step,
    in_step_sharing,
    in_step_telling,
    notify_if_alone,
    notify_of_leaving,
    record_call,
    settled_epoch,
    step_of_op,
)

__all__ = [
    "Gathering",
    "Step",
    "begin_sending",
    "check",
    "epoch_mark",
    "in_op",
    "in_step",
    "in_step_sharing",
    "in_step_telling",
    "notify_if_alone",
    "notify_of_leaving",
    "record_call",
    "room",
    "settle",
    "settled_epoch",
    "step_of_op",
    "wait_for_data",
]
