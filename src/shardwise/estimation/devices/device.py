"""`Device`: what one rank can use, compute and send, in numbers; to and from JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from shardwise.errors import DeviceError

KINDS = ("cuda", "cpu")


@dataclass(frozen=True)
class Rate:
    """A straight line: seconds = start + amount / per_second.

    >>> Rate(per_second=100.0, start=0.5).seconds(200)
    2.5
    """

    per_second: float
    start: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.per_second < math.inf or not 0 <= self.start < math.inf:
            raise DeviceError(
                f"no rate: {self.per_second} per second after {self.start} s; the first must be above 0, and the "
                "second 0 or more"
            )

    def seconds(self, amount: float) -> float:
        """How long this amount takes."""
        return self.start + amount / self.per_second


@dataclass(frozen=True)
class Device:
    """What one rank has: a GPU, or its share of a CPU."""

    name: str
    kind: str  # "cuda" or "cpu"
    memory: int  # bytes that a job may use
    products: Mapping[str, Rate] = field(hash=False)  # FLOP of matrix products, by dtype: "float32", "tf32", "bfloat16"
    attention: Mapping[str, Rate] = field(hash=False)  # FLOP of fused attention, by dtype; of all scores
    copies: Rate  # bytes read and written by a kernel that computes little
    call: float  # seconds that the host needs for one op
    links: Mapping[str, Rate] = field(hash=False)  # bytes that one rank sends: see `link`
    per_machine: int  # how many of them a usual machine has
    reserved: int = 0  # bytes that the runtime holds in the allocator besides tensors
    block: int = 1  # the allocator rounds sizes up to so many bytes
    item: int = field(default=0, compare=False)  # of `devices_of`: devices of different items are in different machines

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise DeviceError(f"device {self.name} is of the kind '{self.kind}': there are {' and '.join(KINDS)}")
        if self.memory <= 0 or self.per_machine <= 0 or self.reserved < 0 or self.block <= 0 or self.call < 0:
            raise DeviceError(
                f"device {self.name}: memory, per_machine and block must be above 0, reserved and call not below it"
            )
        missing = [name for name in ("machine", "network") if name not in self.links]
        if missing:
            raise DeviceError(f"device {self.name} has no rate for the links {' and '.join(missing)}")

    def link(self, where: str, what: str = "") -> Rate:
        """The rate of a link, "machine" or "network"; that of "gather", "sum" or "exchange" there if it is known."""
        return self.links.get(f"{where} {what}", self.links[where])

    def as_json(self) -> dict[str, Any]:
        """The device as JSON's types, for `from_json`."""
        found = {one.name: getattr(self, one.name) for one in fields(self) if one.compare}
        return {name: _plain(value) for name, value in found.items()}

    @staticmethod
    def from_json(described: Any) -> Device:
        """The device that `as_json` described; an error names what is missing, unknown or of the wrong type."""
        if not isinstance(described, Mapping):
            raise DeviceError(f"a device is described by a JSON object, not by a {type(described).__name__}")
        name = described.get("name", "without a name")
        known = {one.name: one for one in fields(Device) if one.compare}
        needed = [field_name for field_name in known if field_name not in ("reserved", "block")]
        missing = [field_name for field_name in needed if field_name not in described]
        if missing:
            raise DeviceError(f"device {name}: missing {', '.join(missing)}")
        unknown = sorted(set(described) - set(known))
        if unknown:
            raise DeviceError(f"device {name}: unknown {', '.join(unknown)}; there are {', '.join(known)}")
        return Device(**{key: _READERS[key](f"device {name}, {key}", value) for key, value in described.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, Rate):
        return {"per_second": value.per_second, "start": value.start}
    return {key: _plain(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise DeviceError(f"{where}: a text is needed, not {value!r}")
    return value


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DeviceError(f"{where}: a number is needed, not {value!r}")
    return float(value)


def _whole(where: str, value: Any) -> int:
    number = _number(where, value)
    if not number.is_integer():
        raise DeviceError(f"{where}: a whole number is needed, not {value!r}")
    return int(number)


def _rate(where: str, value: Any) -> Rate:
    if not isinstance(value, Mapping) or "per_second" not in value:
        raise DeviceError(f"{where}: missing per_second")
    unknown = sorted(set(value) - {"per_second", "start"})
    if unknown:
        raise DeviceError(f"{where}: unknown {', '.join(unknown)}; there are per_second and start")
    return Rate(_number(where, value["per_second"]), _number(where, value.get("start", 0.0)))


def _rates(where: str, value: Any) -> dict[str, Rate]:
    if not isinstance(value, Mapping):
        raise DeviceError(f"{where}: rates by name are needed, not {value!r}")
    return {_text(where, name): _rate(f"{where} {name}", one) for name, one in value.items()}


_READERS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("name", "kind"), _text),
    **dict.fromkeys(("memory", "per_machine", "reserved", "block"), _whole),
    **dict.fromkeys(("products", "attention", "links"), _rates),
    "copies": _rate,
    "call": _number,
}
