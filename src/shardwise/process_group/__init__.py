"""Process groups: who is in one, where a placement lies in it, and whether its ranks agree."""

from shardwise.process_group.agreement import (
    ROOM,
    Fields,
    Step,
    in_step,
    in_step_sharing,
    in_step_telling,
    raises_alone,
    room,
)
from shardwise.process_group.membership import (
    current_process_group,
    group_ranks,
    is_fake,
    is_member,
    load_with_process_group,
    or_default,
    rank_array,
    sends,
    talks,
    without_data,
)
from shardwise.process_group.placing import (
    device_said,
    locate,
    locate_all,
    outside,
    parse_and_validate_remote_device,
    places_said,
    rpc_workers,
)
from shardwise.process_group.told import Told

__all__ = [
    "ROOM",
    "Fields",
    "Step",
    "Told",
    "current_process_group",
    "device_said",
    "group_ranks",
    "in_step",
    "in_step_sharing",
    "in_step_telling",
    "is_fake",
    "is_member",
    "load_with_process_group",
    "locate",
    "locate_all",
    "or_default",
    "outside",
    "parse_and_validate_remote_device",
    "places_said",
    "raises_alone",
    "rank_array",
    "room",
    "rpc_workers",
    "sends",
    "talks",
    "without_data",
]
