"""Loads torch's databases when imported, so that new ranks are forked from a process that has them."""

from benchmarks.coverage.database import ops
from benchmarks.coverage.modules import modules
from benchmarks.coverage.optimizers import optimizers

ops()
modules()
optimizers()
