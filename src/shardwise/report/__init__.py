"""A page that shows an estimate of a training step, a measured trace of one, or both.

Pure: data in, HTML out. The page is one file that loads nothing from anywhere.

- `data`: what a page shows, as frozen values; `Report.as_json` is what the page reads
- `page`: `page`, `save_page` and `notebook` make HTML of a report from the files in `assets/`
- `thinning`: long series and many spans cut down to what a screen can show
- `boxes`: layouts and traffic of many ranks summed up to what is drawn
- `shared`: texts and layouts that many records share, written once
- `assets/`: the template, the style, and one script for each section of the page
"""

from shardwise.report.data import (
    CATEGORIES,
    Alive,
    BoxOnRank,
    Memory,
    ModuleCost,
    ModuleRow,
    ParameterRow,
    PlanRow,
    RankPart,
    Report,
    Run,
    Span,
    as_runs,
)
from shardwise.report.page import notebook, page, save_page

__all__ = [
    "CATEGORIES",
    "Alive",
    "BoxOnRank",
    "Memory",
    "ModuleCost",
    "ModuleRow",
    "ParameterRow",
    "PlanRow",
    "RankPart",
    "Report",
    "Run",
    "Span",
    "as_runs",
    "notebook",
    "page",
    "save_page",
]
