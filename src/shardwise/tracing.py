"""Traces: each collective, the op and line that needed it, its bytes and its time."""

from shardwise.comm.tracing import Collective, Op, Trace, UncachedCall, merge, trace

__all__ = ["Collective", "Op", "Trace", "UncachedCall", "merge", "trace"]
