"""Loads torch's database of ops when imported, so that new ranks are forked from a process that has it."""

from benchmarks.coverage.database import ops

ops()
