"""Traces: each collective, the op and line that needed it, its bytes and its time."""

from shardwise.tracing.chrome import merge
from shardwise.tracing.events import Collective, Op
from shardwise.tracing.record import Trace, trace

__all__ = ["Collective", "Op", "Trace", "merge", "trace"]
