"""Moving data between layouts: what must go where, and sending it.

- what moves: `plan` (of two layouts), `pieces` (of one rank), `relabel`, `recognise` (plans that are collectives)
- in one exchange: `execute` (the verb), `messages`, `all_to_all`, `collectives`, `all_reduce`, `local_copies`
- where values decide what moves: `by_value`
- in rounds within bounded memory, of one tensor or many: `segments`, `rounds`, `bounded` (of one tensor)
- below both: `wire` (bytes between ranks), `views`, `copies` and `copy_kernel`, `sums`
"""

from shardwise.comm.transfer.execute import Moving, empty_tensors, move
from shardwise.comm.transfer.local_copies import Tell
from shardwise.comm.transfer.plan import TransferPlan, make_plan
from shardwise.comm.transfer.relabel import relabel

__all__ = ["Moving", "Tell", "TransferPlan", "empty_tensors", "make_plan", "move", "relabel"]
