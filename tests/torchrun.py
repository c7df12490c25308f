"""What torchrun does with a script, on the ranks of a pool: they are there already, and need not import torch anew."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import torch.distributed as dist


def run_script(script: str, folder: str, *options: str) -> None:
    """Run a script in a folder, on a rank that has joined its group; for `run_on_ranks`."""
    os.chdir(folder)
    launched = mock.patch.dict(os.environ, TORCHELASTIC_RUN_ID="none")
    called = mock.patch.multiple(sys, argv=[script, *options], path=[str(Path(script).parent), *sys.path])
    joined = mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT)
    with launched, called, joined:
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise
