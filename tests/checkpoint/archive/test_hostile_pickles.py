"""Pickles that ask for calls, or for more than there is: a `CheckpointError`, at once, and no code is run."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.archive.locations import make_dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from shardwise.checkpoint.archive.formats import dcp
from shardwise.checkpoint.archive.formats.safe_pickle import read_pickle
from shardwise.checkpoint.storage.local import LocalStorage
from shardwise.errors import CheckpointError


class Calls:
    """Pickled, it asks for a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.made = function, args

    def __reduce__(self) -> Any:
        return self.made


def nested_tuples(depth: int) -> bytes:
    """A tuple of twice a tuple of twice …, as a key: its hash would take for ever."""
    numbers = [struct.pack("<I", k) for k in range(depth)]
    twice = b"".join(b"r" + number + b"j" + number + b"\x86" for number in numbers)
    return b"\x80\x04})" + twice + b"Ns."


HOSTILE: dict[str, bytes] = {
    "os.system": pickle.dumps(Calls(os.system, "touch HARM")),
    "eval": pickle.dumps(Calls(eval, "open('HARM', 'w')")),
    "getattr": pickle.dumps(Calls(getattr, Calls(__import__, "os"), "system")),
    "torch.load": pickle.dumps(Calls(torch.load, "HARM")),
    "by memo": b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94h\x00h\x01\x93\x8c\x0atouch HARM\x85R.",
    "protocol 0": b"cos\nsystem\n(S'touch HARM'\ntR.",
    "inst": b"(S'touch HARM'\nios\nsystem\n.",
    "extension": b"\x80\x04\x82\x01.",
    "huge memo": b"\x80\x04Nr\xff\xff\xff\xff.",
    "huge string": b"\x80\x04\x8d" + struct.pack("<Q", 2**50) + b"abc.",
    "huge bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b".",
    "hash for ever": nested_tuples(200),
    "deep": b"\x80\x04" + b"(" * 100_000 + b"t" * 100_000 + b".",
    "call of a string": b"\x80\x04\x8c\x01a)R.",
    "state of a class": b"\x80\x04ctorch\nSize\n}b.",
    "state of a number": b"\x80\x04K\x01}b.",
    "no stop": b"\x80\x04N",
    "no value": b"\x80\x04.",
    "empty": b"",
    "other": pickle.dumps({"a": 1}),
}


# Those that are no metadata, but can be read as a value.
HARMLESS: dict[str, Any] = {"other": {"a": 1}, "huge memo": None}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the metadata of DCP, and as a value in it: nothing runs."""
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "place"
    make_dcp(place)
    (place / ".metadata").write_bytes(HOSTILE[name])
    with pytest.raises(CheckpointError):
        dcp.build_index(LocalStorage(place))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", HOSTILE[name])
        archive.writestr("archive/version", "3\n")
    (place / "file.pt").write_bytes(buffer.getvalue())
    info = _StorageInfo("file.pt", 0, len(buffer.getvalue()))
    metadata = Metadata({"v": BytesStorageMetadata()}, None, {MetadataIndex("v"): info})
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    if name in HARMLESS:
        assert dcp.build_index(LocalStorage(place)).state == {"v": HARMLESS[name]}
    else:
        with pytest.raises(CheckpointError):
            dcp.build_index(LocalStorage(place))
    assert not (tmp_path / "HARM").exists()


def test_names_are_told_and_plain_values_read() -> None:
    """The error names what a pickle asks for."""
    with pytest.raises(CheckpointError, match=r"asks for 'posix\.system'.*nothing of it was run"):
        read_pickle(HOSTILE["os.system"], (), "the file")
    values = [1, -1, 2**40, -(2**70), 1.5, "a" * 300, b"b" * 300, None, True, (), (1,), (1, 2, 3, 4), {"a": [1]}]
    for protocol in (2, 3, 4, 5):
        kept = values if protocol > 2 else [value for value in values if not isinstance(value, bytes)]
        assert read_pickle(pickle.dumps(kept, protocol), (), "it") == kept
