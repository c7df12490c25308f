"""Torch compiles some kernels at their first call: the folder for them is made once, before several ranks make it."""

import os
from pathlib import Path

import torch

if torch.cuda.is_available():
    Path(os.environ.get("PYTORCH_KERNEL_CACHE_PATH", Path.home() / ".cache" / "torch" / "kernels")).mkdir(
        parents=True, exist_ok=True
    )
