"""Traces: each collective, the op and line that needed it, its bytes and its time."""

from shardwise.comm.tracing import Collective, Op, Trace, merge, trace

__all__ = ["Collective", "Op", "Trace", "merge", "trace"]
