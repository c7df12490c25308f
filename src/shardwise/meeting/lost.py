"""What a rank raises that could not do something with the others, as one of them is gone."""

from __future__ import annotations

from typing import NoReturn

from torch.distributed import ProcessGroup

from shardwise.errors import TransferError
from shardwise.meeting.aside import look, require_sound, told_of_loss
from shardwise.meeting.group import is_late
from shardwise.meeting.watchdog import end_what_waits


def raise_lost(what: str, error: Exception, process_group: ProcessGroup) -> NoReturn:
    """Raise that this rank could not do this with the others, and who is gone; or the error itself, if it tells why.

    If a rank is gone, what an accelerator is sending is ended before: whoever gets the error may wait for the device
    next, and nobody could call it back.
    """
    if isinstance(error, TransferError) or hasattr(error, "told_to"):
        raise error
    require_sound(process_group)  # a watchdog may have ended what was under way, and knows why
    try:
        look(process_group, range(process_group.size()))  # a rank that raised an error and ended may have said which
    except Exception as known:
        found = known
    else:
        found = told_of_loss(what, error, process_group)
    if not is_late(error):
        end_what_waits(process_group, found)
    raise found from error
