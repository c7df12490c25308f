"""`devices_of`: the devices of a job, by name or from files; `machines`: in which machine each of them is."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from shardwise.errors import DeviceError
from shardwise.estimation.devices.device import Device, Rate
from shardwise.estimation.devices.table import TABLE
from shardwise.layout.pictures.words import bytes_text
from shardwise_command.byte_counts import parse_bytes
from shardwise_command.suggestions import did_you_mean

__all__ = ["Device", "Rate", "devices_of", "kinds_of", "machines", "read_devices", "write_devices"]

VERSION = 1  # of the file format
ITEM = re.compile(r"(?:(\d+)\s*[x×]\s*)?([^@]+?)\s*(?:@\s*([^@]+))?")

_by_lower = {name.lower(): device for name, device in TABLE.items()}

# What names devices: a text of items, a file, a device, or several of those.
Devices = str | os.PathLike[str] | Device | Sequence["str | os.PathLike[str] | Device"]


def devices_of(named: Devices) -> tuple[Device, ...]:
    """The devices of a job, one for each rank.

    An item is a name of the table, ``H100-80GB``, or a file that ``shardwise doctor --measure`` wrote, ``here.json``.
    It may have a number before it, ``4xH100-80GB``, and the memory that a job may use behind it, ``H100-80GB@60GiB``. A
    text has items between commas; a sequence has texts, paths or `Device` objects.

    >>> [device.name for device in devices_of("2xH100-80GB, RTX4090")]
    ['H100-80GB', 'H100-80GB', 'RTX4090']
    >>> devices_of("H100-80GB@60GiB")[0].memory == 60 * 2**30
    True
    """
    several = [named] if isinstance(named, str | os.PathLike | Device) else list(named)
    found: list[Device] = []
    item, before = -1, None
    for one in several:
        for part in one.split(",") if isinstance(one, str) else [one]:
            is_single = isinstance(part, Device) or (isinstance(part, str) and part.strip().lower() in _by_lower)
            item += not (is_single and part == before)  # "T4,T4" is one machine with two, "2xT4,2xT4" is two machines
            before = part
            found += [replace(device, item=item) for device in _devices_of_item(part)]
    if not found:
        raise DeviceError("no devices: name some, such as 4xH100-80GB")
    return tuple(found)


def _devices_of_item(part: str | os.PathLike[str] | Device) -> list[Device]:
    if not isinstance(part, str):
        return [part] if isinstance(part, Device) else read_devices(part)
    text = part.strip()
    parsed = ITEM.fullmatch(text)
    if parsed is None:
        raise DeviceError(f"'{text}' is no device: write 4xH100-80GB, H100-80GB@60GiB or 2x devices.json")
    count, name, memory = int(parsed[1] or 1), parsed[2], parsed[3]
    if count == 0:
        raise DeviceError(f"'{text}' is no device at all: write a number from 1 on")
    devices = read_devices(name) if _is_path(name) else [_named(name)]
    if memory is not None:
        try:
            devices = [replace(device, memory=parse_bytes(memory)) for device in devices]
        except ValueError as error:
            raise DeviceError(f"'{text}': {error}") from None
    return devices * count


def _is_path(name: str) -> bool:
    return name.endswith(".json") or "/" in name or os.sep in name


def _named(name: str) -> Device:
    if name.lower() in _by_lower:
        return _by_lower[name.lower()]
    near = did_you_mean(name, TABLE)
    known = "" if near.startswith("there are") else f" There are {', '.join(TABLE)}"
    raise DeviceError(f"there is no device '{name}': {near}{known}; or the path of a file ending with .json")


def machines(devices: Iterable[Device]) -> list[int]:
    """The number of the machine that each device is in.

    Devices that follow each other and come from the same item of `devices_of` are in one machine, up to as many as one
    usually has. So ``2xT4,2xT4`` is two machines, and ``16xH100-80GB`` too.

    >>> machines(devices_of("3xRTX4090,2xT4")), machines(devices_of("6xA10"))
    ([0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1])
    """
    numbers: list[int] = []
    for _, run in groupby(devices, key=lambda device: device.item):
        first = numbers[-1] + 1 if numbers else 0
        numbers += [first + place // device.per_machine for place, device in enumerate(run)]
    return numbers


def kinds_of(devices: Sequence[Device]) -> dict[str, list[int]]:
    """The ranks that have each kind of device; kinds that differ in their memory alone are named with it.

    >>> kinds_of(devices_of("2xT4,A10,A10@8GiB"))
    {'T4': [0, 1], 'A10@21.0 GiB': [2], 'A10@8.0 GiB': [3]}
    """
    sizes: dict[str, set[int]] = {}
    for device in devices:
        sizes.setdefault(device.name, set()).add(device.memory)
    kinds: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        name = device.name if len(sizes[device.name]) == 1 else f"{device.name}@{bytes_text(device.memory)}"
        kinds.setdefault(name, []).append(rank)
    return kinds


# Files ---------------------------------------------------------------------------------------------------------------


def read_devices(path: str | os.PathLike[str]) -> list[Device]:
    """The devices that a file describes, each as often as it says."""
    try:
        described = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise DeviceError(f"there is no file '{path}': `shardwise doctor --measure {path}` writes one") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DeviceError(f"'{path}' is no JSON: {error}") from None
    try:
        return _devices_in(described)
    except DeviceError as error:
        raise DeviceError(f"'{path}': {error}") from None


def _devices_in(described: Any) -> list[Device]:
    missing = [key for key in ("version", "devices") if not isinstance(described, dict) or key not in described]
    if missing:
        raise DeviceError(f"it describes no devices: missing {' and '.join(missing)}")
    if described["version"] != VERSION:
        raise DeviceError(f"its version is {described['version']!r}, and this shardwise reads {VERSION}")
    if not isinstance(described["devices"], list) or not described["devices"]:
        raise DeviceError("its devices are no list of one or more")
    devices: list[Device] = []
    for one in described["devices"]:
        count = one.get("count", 1) if isinstance(one, dict) else 1
        if not isinstance(count, int) or count < 1:
            raise DeviceError(f"count is {count!r}: write a number from 1 on")
        rest = {key: value for key, value in one.items() if key != "count"} if isinstance(one, dict) else one
        devices += [Device.from_json(rest)] * count
    return devices


def write_devices(path: str | os.PathLike[str], devices: Iterable[Device], **about: Any) -> None:
    """Write a file for `read_devices`, whole or not at all; ``about`` says how the numbers came about."""
    runs = [(device, len(list(run))) for device, run in groupby(devices)]
    described = [{"count": count, **device.as_json()} for device, count in runs]
    text = json.dumps({"version": VERSION, "about": about, "devices": described}, indent=1)
    target = Path(path)
    handle, draft = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text + "\n")
        os.chmod(draft, 0o666 & ~_umask())
        os.replace(draft, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise


def _umask() -> int:
    """The bits that new files lack; a temporary file lacks more of them."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
