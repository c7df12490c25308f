"""Moving data between layouts: what must go where, and sending it."""

from shardwise.transfer.execute import Moving, empty_tensors
from shardwise.transfer.plan import TransferPlan, make_plan
from shardwise.transfer.relabel import relabel
from shardwise.transfer.traced import move
from shardwise.transfer.unsent import Tell

__all__ = ["Moving", "Tell", "TransferPlan", "empty_tensors", "make_plan", "move", "relabel"]
