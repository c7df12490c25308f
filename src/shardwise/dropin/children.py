"""Processes that are started from here: they find the drop-in through `PYTHONPATH`.

What starts a Python (`multiprocessing` with spawn or forkserver, torchrun, `subprocess`) hands its environment on, so
the folder `startup` in front of `PYTHONPATH` reaches all of them, and theirs. A forked process has the modules already.
"""

from __future__ import annotations

import os
from pathlib import Path

STARTUP = str(Path(__file__).resolve().parent / "startup")  # holds a sitecustomize.py
VARIABLE = "PYTHONPATH"


def include() -> None:
    """Let every Python that is started from now on put shardwise in the place of the old system."""
    os.environ[VARIABLE] = os.pathsep.join([STARTUP, *_others()])


def exclude() -> None:
    """Leave those that are started from now on alone."""
    others = _others()
    if others:
        os.environ[VARIABLE] = os.pathsep.join(others)
    else:
        os.environ.pop(VARIABLE, None)


def _others() -> list[str]:
    """What else is on the path, as it is: an empty entry stands for the folder that a Python is started in."""
    path = os.environ.get(VARIABLE, "")
    return [entry for entry in path.split(os.pathsep) if entry != STARTUP] if path else []
