"""Child processes find the drop-in through `PYTHONPATH`.

Child processes (of `multiprocessing` with spawn or forkserver, torchrun, `subprocess`) inherit the environment, so the
folder `startup` at the front of `PYTHONPATH` reaches all of them. A forked process has the modules already.
"""

from __future__ import annotations

import os
from pathlib import Path

STARTUP = str(Path(__file__).resolve().parent / "startup")  # holds a sitecustomize.py
VARIABLE = "PYTHONPATH"


def include() -> None:
    """Install the drop-in in all Python processes that are started from now on."""
    os.environ[VARIABLE] = os.pathsep.join([STARTUP, *_others()])


def exclude() -> None:
    """Do not install the drop-in in processes that are started from now on."""
    others = _others()
    if others:
        os.environ[VARIABLE] = os.pathsep.join(others)
    else:
        os.environ.pop(VARIABLE, None)


def _others() -> list[str]:
    """The other entries of the path; an empty entry is the working directory."""
    path = os.environ.get(VARIABLE, "")
    return [entry for entry in path.split(os.pathsep) if entry != STARTUP] if path else []
