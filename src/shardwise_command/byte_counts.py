"""Parsing a number of bytes: of options, and of `max_shard_size` in `shardwise.interop.huggingface`."""

from __future__ import annotations

import re

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int:
    """The number of bytes that a text such as ``5GB``, ``1.5 KiB`` or ``1e9`` gives; a ValueError for other texts."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\d+e\d+)\s*([kmgt]?i?)b?", text.strip().lower())
    if found is None or found[2] == "i" or float(found[1]) * UNITS[found[2]] < 1:
        raise ValueError(f"{text!r} is no number of bytes: write 500MB or 4GiB")
    return int(float(found[1]) * UNITS[found[2]])
