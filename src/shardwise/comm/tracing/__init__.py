"""Traces: each collective, the op and line that needed it, its bytes and its time."""

from shardwise.comm.tracing.events import Collective, Op, UncachedCall
from shardwise.comm.tracing.merging import merge
from shardwise.comm.tracing.record import Trace, trace

__all__ = ["Collective", "Op", "Trace", "UncachedCall", "merge", "trace"]
