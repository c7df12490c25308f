"""Storage in a directory: files that are replaced at once, read as they were opened, and written by one job."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.storage import LocalStorage, Storage, local
from shardwise.errors import CheckpointError, FileGoneError

HOLD = """
import sys
from shardwise.checkpoint.storage import LocalStorage
with LocalStorage(sys.argv[1]).writing() as alone:
    print(alone, flush=True)
    sys.stdin.read()
"""


def content(place: Storage, name: str) -> bytes:
    """All of a file."""
    file = place.open(name)
    found = bytearray(file.size)
    try:
        file.read(0, [memoryview(found)])
    finally:
        file.close()
    return bytes(found)


def test_files_are_written_listed_read_and_removed(tmp_path: Path) -> None:
    """Files and folders by their names, buffers of any size in order, reads at any place."""
    place = LocalStorage(tmp_path / "run")
    assert isinstance(place, Storage)
    assert place.names() == place.folders() == []
    inner = place.within("odd #%?*ü")
    data = bytes(range(256)) * 100
    with inner.writing() as alone:
        assert alone
        assert inner.names() == []  # the lock is none
        inner.write("file [1]", (memoryview(data)[begin : begin + 999] for begin in range(0, len(data), 999)))
        inner.write("empty", [])
        inner.write("many", (memoryview(data)[begin : begin + 1] for begin in range(3000)))
        inner.replace("index.json", b"{}")
    assert (inner.names(), inner.folders()) == (["empty", "file [1]", "index.json", "many"], [])
    assert (place.names(), place.folders()) == ([], ["odd #%?*ü"])
    assert content(inner, "file [1]") == data
    assert content(inner, "many") == data[:3000]
    assert content(inner, "empty") == b""
    assert 0 <= inner.seconds_since("empty") < 600
    file = inner.open("file [1]")
    into = [bytearray(size) for size in (1, 0, 500, 3)]
    file.read(77, [memoryview(one) for one in into])
    assert b"".join(into) == data[77:581]
    with pytest.raises(CheckpointError, match=r"file \[1\]' ends at byte 25,600, before all that is wanted"):
        file.read(len(data) - 3, [memoryview(bytearray(4))])
    inner.remove([*inner.names(), "not there"])
    file.read(0, [memoryview(bytearray(9))])
    file.close()
    assert not inner.path.exists()


def _replace_for_ever(folder: str) -> None:
    place = LocalStorage(folder)
    for number in range(1_000_000):
        place.replace("index.json", bytes([number % 256]) * (1 + number % 5000))


def test_a_reader_sees_all_of_one_file_or_all_of_another(tmp_path: Path) -> None:
    """While another process replaces a file again and again, and dies in the middle, no mixture and no gap is read."""
    place = LocalStorage(tmp_path)
    place.replace("index.json", b"\0")
    writer = multiprocessing.get_context("spawn").Process(target=_replace_for_ever, args=(str(tmp_path),))
    writer.start()
    seen: set[int] = set()
    while len(seen) < 50:
        assert writer.is_alive()
        found = content(place, "index.json")
        assert found == found[:1] * len(found)
        seen.add(len(found))
    writer.kill()
    writer.join()
    found = content(place, "index.json")
    assert found == found[:1] * len(found)
    place.replace("index.json", b"after")  # whatever the dead one left beside it
    assert (content(place, "index.json"), place.names()) == (b"after", ["index.json"])


def test_what_was_opened_is_read_as_it_was(tmp_path: Path) -> None:
    """A file may be replaced or removed while it is open."""
    place = LocalStorage(tmp_path / "run")
    with place.writing():
        place.replace("index.json", b"first")
        file = place.open("index.json")
        place.replace("index.json", b"second, longer")
        found = bytearray(file.size)
        file.read(0, [memoryview(found)])
        assert found == b"first"
        other = place.open("index.json")
        place.remove(["index.json"])
    found = bytearray(other.size)
    other.read(0, [memoryview(found)])
    assert found == b"second, longer"
    file.close()
    other.close()


def test_one_job_writes_and_a_dead_one_is_no_matter(tmp_path: Path) -> None:
    """A second process, or thread, is refused at once; after SIGKILL nothing is in the way; nothing is left behind."""
    place = LocalStorage(tmp_path / "a" / "run")
    command = [sys.executable, "-c", HOLD, str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        with pytest.raises(CheckpointError, match=r"another job is saving to '.*/a/run': wait"), place.writing():
            pass
        assert place.path.is_dir()  # which is the other's
        holder.send_signal(signal.SIGKILL)
    with place.writing() as alone:
        assert alone
        refused: list[BaseException] = []

        def try_too() -> None:
            try:
                with place.writing():
                    pass
            except CheckpointError as error:
                refused.append(error)

        thread = threading.Thread(target=try_too)
        thread.start()
        thread.join()
        assert len(refused) == 1
    assert list(place.path.iterdir()) == []


def test_folders_that_were_made_go_if_nothing_was_written(tmp_path: Path) -> None:
    """Those that were there stay, and so does what others put there; also when the job fails."""
    place = LocalStorage(tmp_path / "a" / "b" / "c")
    with pytest.raises(ZeroDivisionError), place.writing():
        1 // len(place.names())
    assert list(tmp_path.iterdir()) == []
    with place.writing():
        (tmp_path / "a" / "mine").touch()
    assert os.listdir(tmp_path / "a") == ["mine"]
    (tmp_path / "empty").mkdir()
    with LocalStorage(tmp_path / "empty").writing():
        pass
    assert (tmp_path / "empty").is_dir()


def test_what_is_no_file_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe without a writer is not waited for, and a file that is missing says so by its kind of error."""
    place = LocalStorage(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        for name, what in [("pipe", "not a file, but a pipe"), ("folder", "not a file, but a directory")]:
            with pytest.raises(CheckpointError, match=what):
                place.open(name)
        with pytest.raises(CheckpointError, match=r"could not open '.*/socket'"):
            place.open("socket")
    for reach in (place.open, place.seconds_since):
        with pytest.raises(FileGoneError, match=r"could not \w+ '.*/missing': No such file"):
            reach("missing")
    with pytest.raises(CheckpointError, match=r"could not write '.*/folder': File exists"):
        place.write("folder", [])
    with pytest.raises(CheckpointError, match=r"there is no directory '.*/elsewhere' here, though another rank"):
        place.within("elsewhere").write("file", [])
    with pytest.raises(CheckpointError, match=r"could not list '.*/pipe': Not a directory"):
        place.within("pipe").names()


def test_what_the_disk_refuses_is_said_and_the_old_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full or is only read, at each step of a replacement."""
    place = LocalStorage(tmp_path)
    place.replace("index.json", b"old")

    def failing(number: int) -> Any:
        def fail(*args: Any, **kwargs: Any) -> None:
            raise OSError(number, os.strerror(number))

        return fail

    for call, number in [
        ("pwrite", errno.ENOSPC),
        ("fsync", errno.EDQUOT),
        ("replace", errno.EROFS),
        ("open", errno.EACCES),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(local.os, call, failing(number))
            with pytest.raises(CheckpointError, match=rf"could not write '.*index.json': {os.strerror(number)}"):
                place.replace("index.json", b"new")
        assert (content(place, "index.json"), place.names()) == (b"old", ["index.json"])
    with monkeypatch.context() as patch:
        patch.setattr(local.Path, "mkdir", failing(errno.EROFS))
        with pytest.raises(CheckpointError, match=r"could not make '.*/new': Read-only file system"):
            place.within("new").writing().__enter__()
    place.replace("index.json", b"new")
    assert (content(place, "index.json"), place.names()) == (b"new", ["index.json"])
