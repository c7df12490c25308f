"""Storage at a URL: in memory, and on a real server that speaks S3, also when it fails."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import threading
import tracemalloc
import uuid
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from tests.checkpoint.storage.servers import BUCKET, KEYS, Proxy, proxy_to, s3_server, web_server

from shardwise.checkpoint.storage import LocalStorage, RemoteStorage, Storage, parts, retries, storage_at
from shardwise.checkpoint.storage.objects import Objects
from shardwise.errors import CheckpointError, FileGoneError
from shardwise.testing import ranks

ODD = ["[x]", "a b", "a#b", "a%20b", "a*", "a+b&c", "a?b", "a_b", "index.json", "ü😀"]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server that speaks S3."""
    with s3_server() as found:
        yield found


@pytest.fixture(params=["memory", "s3", "files of s3fs"])
def place(request: pytest.FixtureRequest, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> RemoteStorage:
    """An empty folder of each kind; the last goes the way of every store that has no way of its own, as gcsfs does."""
    if request.param == "memory":
        return RemoteStorage(f"memory://{uuid.uuid4()}/run")
    if request.param == "files of s3fs":
        monkeypatch.setattr(RemoteStorage, "_kind", lambda self: Objects)
    return at(endpoint)


@pytest.fixture
def faulty(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Proxy, RemoteStorage]]:
    """A folder behind a proxy that fails when told, and waits that are short."""
    monkeypatch.setattr(retries, "FIRST_WAIT", 0.001)
    with proxy_to(endpoint) as (proxy, address):
        yield proxy, at(address)


def at(endpoint: str, folder: str | None = None, **options: object) -> RemoteStorage:
    """A folder on a server."""
    return RemoteStorage(f"s3://{BUCKET}/{folder or uuid.uuid4()}", endpoint_url=endpoint, **KEYS, **options)


def content(place: Storage, name: str) -> bytes:
    """All of a file."""
    file = place.open(name)
    found = bytearray(file.size)
    file.read(0, [memoryview(found)])
    file.close()
    return bytes(found)


def noise(size: int) -> np.ndarray:
    """Bytes."""
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


def test_names_are_kept_as_they_are(place: RemoteStorage) -> None:
    """Files and folders of odd names are listed, read and removed by them, and none for another that * would mean."""
    assert isinstance(place, Storage)
    assert place.names() == place.folders() == []
    with place.writing() as alone:
        assert not alone
    assert place.names() == []
    inner = place.within("run 1#%2F?ü")
    assert str(inner) == f"{place}/run 1#%2F?ü"
    for name in ODD:
        inner.replace(name, name.encode())
    place.write("empty", [])
    assert (place.names(), place.folders()) == (["empty"], ["run 1#%2F?ü"])
    assert content(place, "empty") == b""
    assert inner.names() == sorted(ODD)
    assert inner.folders() == []
    assert [content(inner, name).decode() for name in ODD] == ODD
    assert all(0 <= inner.seconds_since(name) < 600 for name in ODD)
    inner.remove(["a?b", "a*", "[x]", "not there"])
    assert inner.names() == sorted({*ODD} - {"a?b", "a*", "[x]"})
    inner.remove(inner.names())
    inner.remove([])
    assert inner.names() == []
    again = pickle.loads(pickle.dumps(place))
    assert again.names() == ["empty"]


def test_a_large_file_goes_in_parts_and_comes_in_ranges(place: RemoteStorage) -> None:
    """What was written in buffers of odd sizes, in memory that is used again, is read at odd places."""
    data = noise(40 * 2**20 + 12345)
    cuts = [0, 1, 7, 5_000_001, 5_000_001, 38_000_000, len(data)]
    memory = np.empty_like(data)

    def buffers() -> Iterator[memoryview]:
        for begin, end in pairwise(cuts):
            memory[: end - begin] = data[begin:end]
            yield memoryview(memory[: end - begin])

    place.write("large", buffers())
    assert place.names() == ["large"]
    file = place.open("large")
    assert file.size == len(data)
    whole = np.zeros(len(data) - 10, np.uint8).reshape(5, -1)
    file.read(3, [memoryview(whole[0, :1]), memoryview(whole[0, 1:]), memoryview(whole[1:])])
    np.testing.assert_array_equal(whole.reshape(-1), data[3 : 3 + whole.size])
    for begin, sizes in [(0, [0]), (1, [1]), (16 * 2**20 - 3, [5, 0, 2]), (len(data) - 4, [4]), (999, [17 * 2**20, 3])]:
        into = [np.zeros(size, np.uint8) for size in sizes]
        file.read(begin, [memoryview(one) for one in into])
        np.testing.assert_array_equal(np.concatenate(into), data[begin : begin + sum(sizes)])
    with pytest.raises(CheckpointError, match=r"large' ends at byte 41,955,385, before"):
        file.read(len(data) - 3, [memoryview(bytearray(4))])


def test_an_upload_holds_a_few_parts_in_memory(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file that is made on demand, no more is in memory than the parts that are on their way."""
    monkeypatch.setattr(parts, "PART", 5 * 2**20)
    place = at(endpoint)
    place.replace("index.json", b"{}")  # connects
    tracemalloc.start()
    try:
        place.write("large", (memoryview(bytes(2**20)) for _ in range(100)))
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held < 60 * 2**20
    assert place.open("large").size == 100 * 2**20


def test_a_write_that_fails_leaves_nothing(place: RemoteStorage) -> None:
    """What goes wrong with the caller's own buffers comes out as it is; neither a file nor parts of one are left."""

    def buffers() -> Iterator[memoryview]:
        yield memoryview(bytes(35 * 2**20))
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        place.write("large", buffers())
    assert place.names() == []
    if str(place).startswith("s3"):
        filesystem = place._connected().filesystem
        assert filesystem.call_s3("list_multipart_uploads", Bucket=BUCKET).get("Uploads", []) == []


def test_others_see_a_file_at_once_and_whoever_reads_the_old_one_fails(place: RemoteStorage) -> None:
    """Listings are never old, and what is read is what was opened, or nothing."""
    other = pickle.loads(pickle.dumps(place))
    assert other.names() == []
    place.replace("index.json", b"first")
    assert other.names() == ["index.json"]
    file = other.open("index.json")
    place.replace("index.json", b"other")
    with pytest.raises(CheckpointError, match=r"could not read '.*index.json': it was written anew since") as caught:
        file.read(1, [memoryview(bytearray(2))])
    assert not isinstance(caught.value, FileGoneError)
    assert content(other, "index.json") == b"other"
    file = other.open("index.json")
    place.remove(["index.json"])
    with pytest.raises(FileGoneError, match=r"could not read '.*index.json'"):
        file.read(1, [memoryview(bytearray(2))])
    for reach in (other.open, other.seconds_since):
        with pytest.raises(FileGoneError, match=r"could not (open|find) '.*index.json'"):
            reach("index.json")
    place.within("folder").replace("index.json", b"")
    with pytest.raises(CheckpointError, match=r"could not open '.*folder': it is not a file, but a folder"):
        place.open("folder")


@ranks(3)
def _ranks_write_side_by_side(endpoint: str, folder: str) -> None:
    rank = dist.get_rank()
    place = at(endpoint, folder)
    assert place.names() == []
    dist.barrier()
    thread = threading.Thread(target=lambda: place.write(f"rank-{rank}", [memoryview(noise(17 * 2**20 + rank))]))
    thread.start()
    thread.join()
    dist.barrier()
    assert place.names() == [f"rank-{other}" for other in range(3)]
    other = (rank + 1) % 3
    assert content(place, f"rank-{other}") == noise(17 * 2**20 + other).tobytes()
    dist.barrier()


def test_ranks_and_their_threads_write_side_by_side(endpoint: str) -> None:
    """Each rank writes from a thread what the others then read."""
    _ranks_write_side_by_side(endpoint, str(uuid.uuid4()))


def test_a_forked_process_uses_what_its_parent_made(endpoint: str) -> None:
    """fsspec's file systems do not survive a fork, but a storage does, and its parent's as well."""
    place = at(endpoint)
    place.replace("before", b"parent")

    def child() -> None:
        assert content(place, "before") == b"parent"
        place.replace("after", b"child")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
    process.join()
    assert process.exitcode == 0
    assert content(place, "after") == b"child"


@pytest.mark.parametrize("faults", [["429", "500", "502", "503"], ["cut", "cut", "lost", "lost"]])
def test_failures_that_pass_are_tried_again(faulty: tuple[Proxy, RemoteStorage], faults: list[str]) -> None:
    """Every call survives four failures in a row, of servers or of lines."""
    proxy, place = faulty
    data = noise(17 * 2**20)
    calls = {
        "PUT": lambda: place.replace("index.json", b"{}"),
        "GET": lambda: place.names() == ["index.json"],
        "HEAD": lambda: place.open("index.json").size == 2,
        "uploads": lambda: place.write("large", [memoryview(data)]),
        "partNumber=2": lambda: place.write("large", [memoryview(data)]),
        "POST /bucket/": lambda: place.write("large", [memoryview(data)]),
        "GET /bucket/": lambda: content(place, "large") == data.tobytes(),
        "delete": lambda: place.remove(["large"]),
    }
    for of, call in calls.items():
        proxy.fail(faults, of)
        assert call() in (None, True), of
        assert proxy.asked(of) >= 5
    assert place.names() == ["index.json"]


def test_an_upload_whose_last_answer_was_lost_is_done(faulty: tuple[Proxy, RemoteStorage]) -> None:
    """The parts were put together, so there is nothing to put together again."""
    proxy, place = faulty
    data = noise(17 * 2**20)
    proxy.fail(["lost"], "?uploadId")
    place.write("large", [memoryview(data)])
    assert content(place, "large") == data.tobytes()


def test_short_and_silent_answers_are_asked_for_again(faulty: tuple[Proxy, RemoteStorage]) -> None:
    """Half of a range is never taken for all of it, and a server that says nothing is not waited for for ever."""
    proxy, place = faulty
    data = noise(100_000)
    place.replace("file", data.tobytes())
    hasty = RemoteStorage(str(place), tries=10**6, config_kwargs={"read_timeout": 1}, **place._options)
    for how, count, reader in [("short", 4, place), ("silent", 1, hasty)]:
        file = reader.open("file")
        proxy.fail([how] * count, "GET")
        found = bytearray(90_000)
        file.read(5, [memoryview(found)])
        assert found == data[5:90_005].tobytes()
        asked = proxy.asked("GET")
        assert asked == count + 1 or (reader is hasty and asked > count)  # of a server that is slow, more often


def test_failures_that_last_are_told_in_one_line(faulty: tuple[Proxy, RemoteStorage]) -> None:
    """What was done, where, how often and what came; and what is not allowed is not tried again."""
    proxy, place = faulty
    place.replace("file", b"12345")
    file = place.open("file")
    proxy.fail(["503"] * 1000)
    for call in (
        lambda: place.replace("file", b""),
        lambda: place.write("new", [memoryview(bytes(20 * 2**20))]),
        lambda: place.open("file"),
        lambda: file.read(0, [memoryview(bytearray(5))]),
    ):
        with pytest.raises(CheckpointError, match=rf"^could not \w+ '{place}/\w+' after 5 tries: .*50?3") as caught:
            call()
        assert "\n" not in str(caught.value)
    for call in (place.names, lambda: place.remove(["file"])):
        with pytest.raises(CheckpointError, match=rf"^could not [\w ]+ '{place}' after 5 tries: "):
            call()
    patient = RemoteStorage(str(place), tries=2, **place._options)
    proxy.fail(["503"] * 1000)
    with pytest.raises(CheckpointError, match="after 2 tries: "):
        patient.open("file")
    assert proxy.asked() == 2
    proxy.fail(["403"] * 1000)
    with pytest.raises(CheckpointError, match=rf"^could not open '{place}/file': "):
        place.open("file")
    assert proxy.asked() == 1
    proxy.fail(["503"] * 1000, "partNumber=3")
    with pytest.raises(CheckpointError, match="could not write"):
        place.write("large", [memoryview(bytes(40 * 2**20))])
    assert place.names() == ["file"]
    assert proxy.asked("DELETE") == 1  # of the upload


def test_what_is_missing_is_said(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket, credentials, a package: each in one line, at the first try."""
    nowhere = RemoteStorage("s3://no-bucket/run", endpoint_url=endpoint, **KEYS)
    with pytest.raises(
        CheckpointError, match=r"^could not write 's3://no-bucket/run/x': .*bucket does not exist"
    ) as caught:
        nowhere.replace("x", b"")
    assert not isinstance(caught.value, FileGoneError)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CheckpointError, match=r"^could not open 's3://bucket/x': NoCredentialsError: Unable to locate"):
        RemoteStorage("s3://bucket", endpoint_url=endpoint).open("x")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(CheckpointError, match=r"^'gs://bucket/run' needs gcsfs: pip install gcsfs$"):
        storage_at("gs://bucket/run")
    with pytest.raises(CheckpointError, match=r"^'warp://bucket/run' lies nowhere: no storage is known by 'warp://'$"):
        storage_at("warp://bucket/run")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(CheckpointError, match=r"^'s3://b/x' needs fsspec and s3fs: pip install shardwise\[storage\]$"):
        storage_at("s3://b/x")
    with pytest.raises(CheckpointError, match=r"^'gs://b/x' needs fsspec and gcsfs: pip install fsspec gcsfs$"):
        storage_at("gs://b/x")


def test_the_web_is_only_read(tmp_path: Path) -> None:
    """A folder on a web server is listed and read, even where that gives whole files only; nothing is written there."""
    for name in ("a b#c%d?", "index.json"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "large").write_bytes(bytes(16 * 2**20 + 1))
    (tmp_path / "within it").mkdir()
    with web_server(tmp_path) as url:
        place = storage_at(f"{url}/?signature=5")
        assert str(place) == f"{url}/"[:-1]
        assert place.names() == ["a b#c%d?", "index.json", "large"]
        assert place.folders() == ["within it"]
        assert place.within("within it").names() == []
        assert content(place, "a b#c%d?") == b"a b#c%d?"
        part = bytearray(3)
        place.open("index.json").read(2, [memoryview(part)])
        assert part == b"dex"
        assert place.seconds_since("index.json") < 600
        with pytest.raises(CheckpointError, match="large': its server gives nothing but whole files"):
            place.open("large").read(2, [memoryview(part)])
        with pytest.raises(FileGoneError, match=f"could not open '{url}/none'"):
            place.open("none")
        for write in (
            lambda: place.writing().__enter__(),
            lambda: place.write("x", []),
            lambda: place.replace("x", b""),
            lambda: place.remove(["x"]),
        ):
            with pytest.raises(CheckpointError, match=rf"^'{url}' can only be read: save to"):
                write()


def test_an_address_says_which_storage_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are local, URLs are not, and what might be either is refused before a folder is made."""
    monkeypatch.chdir(tmp_path)
    own = LocalStorage(tmp_path)
    assert storage_at(own) is own
    for address in ("memory://x/y/", "S3://bucket", "s3://bucket/a b", "https://host/x"):
        assert isinstance(storage_at(address), RemoteStorage)
    assert str(storage_at("memory://x/y/")) == "memory://x/y"
    for address, path in [
        ("x", tmp_path / "x"),
        ("foo:bar", tmp_path / "foo:bar"),
        ("c:/x", tmp_path / "c:/x"),
        ("./s3:/b", tmp_path / "s3:/b"),
        (tmp_path / "x", tmp_path / "x"),
        ((tmp_path / "a b").as_uri(), tmp_path / "a b"),
        ("file://localhost/x", Path("/x")),
    ]:
        found = storage_at(address)
        assert isinstance(found, LocalStorage)
        assert found.path == path
    for address, why in [
        (Path("s3://b/x"), "lost a slash in a Path"),
        (str(Path("gs://b/x")), "lost a slash in a Path"),
        ("runs/s3://b/x", "neither a URL nor a path"),
        ("simplecache::s3://b/x", "neither a URL nor a path"),
        ("file://host/x", "names no local path"),
        ("file://x", "names no local path"),
        ("s3://", "is no address of a folder"),
        (b"x", "found bytes"),
        (5, "found int"),
        (None, "found NoneType"),
    ]:
        with pytest.raises(CheckpointError, match=why):
            storage_at(address)
    with pytest.raises(CheckpointError, match="tries=0"):
        RemoteStorage("memory://x", tries=0)
    assert list(tmp_path.iterdir()) == []
