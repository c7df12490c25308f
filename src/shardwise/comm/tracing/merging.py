"""`merge`: what several ranks have saved, as one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardwise import report
from shardwise.comm.tracing.chrome import read, traced_ranks, write
from shardwise.comm.tracing.page import report_of, run_of


def merge(paths: Sequence[str | Path], into: str | Path) -> None:
    """Put the JSON files that the ranks have saved together into one, with a process for each rank.

    A path that ends with ``.html`` gets a page, on which a rank is chosen.
    """
    events = read(paths)
    if Path(into).suffix == ".html":
        report.save_page(report_of("measured", [run_of(traced_ranks(events), "measured")]), into)
    else:
        write(into, events)
