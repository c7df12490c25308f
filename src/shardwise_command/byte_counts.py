"""Parsing a number of bytes: of options, and of `max_shard_size` in `shardwise.interop.huggingface`."""

from __future__ import annotations

import re

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

LEAST_WITHOUT_UNIT = 2**20  # bytes


def parse_bytes(text: str) -> int:
    """The number of bytes that a text such as ``5GB``, ``1.5 KiB`` or ``1e9`` gives; a ValueError for other texts.

    A number below 1 MiB needs a unit, for somebody who writes 80 rarely means 80 bytes.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\d+e\d+)\s*([kmgt]?i?)(b?)", text.strip().lower())
    if found is None or found[2] == "i" or float(found[1]) * UNITS[found[2]] < 1:
        raise ValueError(f"{text!r} is no number of bytes: write 500MB or 4GiB")
    if not found[2] + found[3] and float(found[1]) < LEAST_WITHOUT_UNIT:
        raise ValueError(f"{text!r} has no unit: write {found[1]}GiB, or {found[1]}B for bytes")
    return int(float(found[1]) * UNITS[found[2]])
