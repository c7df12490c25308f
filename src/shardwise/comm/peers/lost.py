"""What a rank raises that could not do something with the others, as one of them is gone."""

from __future__ import annotations

from typing import NoReturn

from torch.distributed import ProcessGroup

from shardwise.comm.peers.lost_ranks import is_late
from shardwise.comm.peers.status import check_peers, is_known, loss_notice, require_usable
from shardwise.comm.peers.watchdog import abort_pending
from shardwise.errors import TransferError


def raise_lost(what: str, error: Exception, process_group: ProcessGroup) -> NoReturn:
    """Raise that this rank could not do this with the others, and who is gone; or the error itself, if it tells why.

    If a rank is gone, what an accelerator is sending is ended before: whoever gets the error may wait for the device
    next, and nobody could call it back.
    """
    if isinstance(error, TransferError) or is_known(error):
        raise error
    require_usable(process_group)  # a watchdog may have ended what was under way, and knows why
    try:
        # A rank that raised an error and ended may have written which.
        check_peers(process_group, range(process_group.size()))
    except Exception as known:
        found = known
    else:
        found = loss_notice(what, error, process_group)
    if not is_late(error):
        abort_pending(process_group, found)
    raise found from error
