"""A state that goes from one job to another: they were started apart, one dies, comes back, or cannot be reached."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.patience import PATIENT
from tests.state_transfer.apart import Job

from shardwise.errors import RankMismatchError, RecipeError, TransferError

LONG = 10 * PATIENT  # a timeout that never passes: what ranks raise they have found out
SHORT = 1.0  # one that passes, where nobody comes
SMALL = 16 * 1024  # max_bytes: a transfer has several rounds


def free_address(host: str = "127.0.0.1") -> str:
    """Where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{host}:{probe.getsockname()[1]}"


class Pair:
    """A trainer and an engine."""

    def __init__(self, folder: Path, address: str, engines: int, namespaces: tuple[str, str] | None = None) -> None:
        self.folder, self.address, self.namespaces = folder, address, namespaces or (None, None)
        self.jobs: list[Job] = []
        self.trainer, self.engine = self.start(0, 2), self.start(1, engines)

    def start(self, side: int, ranks: int, **options: Any) -> Job:
        """A job of one side."""
        job = Job(self.folder, ranks, self.namespaces[side])
        self.jobs.append(job)
        job.call("hold", (None if ranks == 1 else side) if side else 0)
        given = {"address": self.address, "timeout": LONG, "max_bytes": SMALL, **options}
        job.call("between", ("source", "target")[side], **given)
        return job

    def move(self, version: int) -> None:
        """A version arrives, exactly."""
        self.trainer.call("fill", version)
        self.engine.begin("run")
        while not all(self.trainer.call("poll")):
            pass
        assert set(self.trainer.call("run", version)) == {version}
        assert {raised(each) for each in self.engine.told()} == {version}
        assert set(self.engine.call("holds")) == {version}

    def close(self) -> None:
        """End all processes."""
        for job in self.jobs:
            job.kill()


def raised(answer: Any) -> Any:
    """What a rank gave; raises its error."""
    if isinstance(answer, Exception):
        raise answer
    return answer


def failures(answers: list[Any], kind: type[Exception] = TransferError) -> set[str]:
    """What all ranks have raised."""
    assert all(type(answer) is kind for answer in answers), answers
    return {str(answer) for answer in answers}


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """Two ranks of a trainer, and an engine of as many as asked for."""
    found = Pair(tmp_path, free_address(), getattr(request, "param", 1))
    yield found
    found.close()


@pytest.mark.parametrize("pair", [2, 1], indirect=True, ids=["two engine ranks", "one"])
def test_versions_arrive_and_either_job_may_die(pair: Pair) -> None:
    """Killed in the middle, a rank or all: whoever is left raises in time, holds what it held, and meets the next."""
    pair.move(1)
    pair.move(7)

    pair.engine.call("keep")
    pair.engine.begin("stall", 2).told()
    pair.engine.begin("run")
    pair.trainer.call("fill", 8)
    pair.trainer.begin("run", 8)
    assert set(pair.engine.told()) == {"stalled"}
    *survivors, killed = pair.engine.connections
    pair.engine.kill(len(survivors))
    pair.engine.connections = survivors
    for connection in survivors:
        connection.send(None)
    failures(pair.engine.told())
    assert pair.engine.call("is_kept") == [True] * len(survivors)
    killed.close()
    pair.engine.kill()
    (said,) = failures(pair.trainer.told())
    assert "of the target" in said
    (said,) = failures(pair.trainer.begin("run", 9).told())
    assert "still gone" in said

    pair.engine = pair.start(1, len(pair.engine.processes))
    pair.move(10)

    pair.trainer.begin("stall", 2).told()
    pair.trainer.call("fill", 11)
    pair.engine.begin("run")
    pair.trainer.begin("run", 11)
    assert set(pair.trainer.told()) == {"stalled"}
    pair.trainer.kill()
    assert failures(pair.engine.told())
    assert set(pair.engine.call("holds")) == {10}

    pair.trainer = pair.start(0, 2)
    pair.move(12)
    pair.move(13)


def test_an_engine_that_came_late_and_is_lost_is_not_waited_for(pair: Pair) -> None:
    """The trainer has waited for it: the engine that it meets then is the one that is gone, not one that came since."""
    pair.engine.call("stall", 2)
    pair.trainer.begin("run", 1)
    while not all(pair.engine.call("poll")):
        pass
    pair.engine.begin("run")
    assert set(pair.engine.told()) == {"stalled"}
    pair.engine.kill()
    (said,) = failures(pair.trainer.told())
    assert "of the target" in said
    pair.trainer.call("wait_at_most", PATIENT / 10)
    (said,) = failures(pair.trainer.begin("run", 2).told())
    assert "still gone" in said
    pair.engine = pair.start(1, 1)
    pair.move(3)


def test_an_engine_serves_while_it_receives(pair: Pair) -> None:
    """What arrives in the background is in place when the engine says so; until then it has the old version, whole."""
    assert pair.engine.call("poll") == [False]
    pair.move(1)
    pair.engine.call("begin_run")
    pair.trainer.call("fill", 2)
    assert pair.trainer.call("run") == [2, 2]
    assert pair.engine.call("end_run") == [(1, True, 2)]
    pair.trainer.call("fill", 3)
    pair.trainer.begin("run")
    while not all(pair.engine.call("poll")):
        pass
    assert pair.engine.call("run") == [3]
    assert [raised(each) for each in pair.trainer.told()] == [3, 3]
    assert pair.engine.call("holds") == [3]


def test_both_jobs_hear_what_does_not_fit(pair: Pair) -> None:
    """All that is wrong, and the same in both; once it is mended in the one job, the other goes on."""
    pair.trainer.call("without", "mlp")
    pair.trainer.call("without", "norm")
    pair.engine.begin("run")
    (said,) = failures(pair.trainer.begin("run").told() + pair.engine.told(), RecipeError)
    assert "'mlp'" in said
    assert "'norm'" in said
    pair.engine.kill()
    pair.engine = pair.start(1, 1, max_bytes=2 * SMALL)
    pair.engine.begin("run")
    while not all(pair.trainer.call("poll")):
        pass
    (said,) = failures(pair.trainer.begin("run").told() + pair.engine.told(), RankMismatchError)
    assert f"max_bytes={SMALL} on rank 0 of the source, max_bytes={2 * SMALL} on rank 0 of the target" in said
    pair.engine.kill()
    pair.engine = pair.start(1, 1, strict=False, rename={"embed": "elsewhere"})
    pair.trainer.kill()
    pair.trainer = pair.start(0, 2, strict=False)
    pair.engine.begin("run")
    (said,) = failures(pair.trainer.begin("run").told() + pair.engine.told(), RankMismatchError)
    assert "rename differs" in said


def test_nobody_waits_for_who_is_not_there(tmp_path: Path) -> None:
    """No store at the address, another name, or a job of its own: an error that says who is missed."""
    jobs = [Job(tmp_path, 1) for _ in range(3)]
    try:
        trainer, other, lost = jobs
        address = free_address()
        for job, side, name, where in (
            (trainer, "source", "policy", address),
            (other, "target", "critic", address),
            (lost, "target", "policy", free_address()),
        ):
            job.call("hold", None)
            job.call("between", side, name=name, address=where, timeout=SHORT)
        trainer.call("reach_store")
        other.call("reach_store")
        said = [failures(job.begin("run").told()).pop() for job in jobs]
        assert f"waited {SHORT:g} s for the target of 'policy'" in said[0]
        assert f"waited {SHORT:g} s for the source of 'critic'" in said[1]
        assert "cannot be reached" in said[2]
        with pytest.raises(TransferError, match="to host the store"):
            other.call("between", "source", address=address)
        trainer.call("between", "source", name="second", address=address)  # in the process that hosts it
        with pytest.raises(ValueError, match="host:port"):
            other.call("between", "source", address="somewhere")
    finally:
        for job in jobs:
            job.kill()


def test_meeting_again_and_again_leaves_nothing_behind(pair: Pair) -> None:
    """Neither open files nor threads."""
    pair.engine.begin("rejoin", 25)
    for rank in [*pair.trainer.begin("rejoin", 25).told(), *pair.engine.told()]:
        assert raised(rank) is None


# Two hosts -----------------------------------------------------------------------------------------------------------


def ip(*words: str) -> None:
    """Configure the network."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Hosts:
    """Two namespaces of the network, with a link between them."""

    def __init__(self) -> None:
        tag = f"sw{time.monotonic_ns() % 10**8}"
        self.names = f"{tag}a", f"{tag}b"
        self._ends = f"{tag}v", f"{tag}w"
        try:
            for name in self.names:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            (one, other), (end, far) = self.names, self._ends
            ip("link", "add", end, "netns", one, "type", "veth", "peer", "name", far, "netns", other)
            for number, (name, link) in enumerate(zip(self.names, self._ends, strict=True), 1):
                ip("-n", name, "addr", "add", f"10.213.7.{number}/24", "dev", link)
                ip("-n", name, "link", "set", link, "up")
        except (OSError, subprocess.CalledProcessError):
            self.close()
            raise

    def link(self, state: str) -> None:
        """Cut it, or mend it."""
        ip("-n", self.names[1], "link", "set", self._ends[1], state)

    def close(self) -> None:
        """Take them down."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Skips where a process may not have them."""
    if shutil.which("ip") is None:
        pytest.skip("two hosts are two network namespaces, which need iproute2: there is no `ip` here")
    try:
        found = Hosts()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this process may not make network namespaces: {getattr(error, 'stderr', '') or error}")
    yield found
    found.close()


def test_a_link_between_two_hosts_is_cut(hosts: Hosts, tmp_path: Path) -> None:
    """In the middle of a transfer: both jobs raise, the engine's ranks have the old version, and meet later.

    When all has arrived, and the engine cannot find out any more that the trainer knows it: it has the old one, too.
    """
    pair = Pair(tmp_path, free_address("10.213.7.1"), 2, hosts.names)
    try:
        pair.move(1)
        for job in pair.trainer, pair.engine:
            job.begin("stall", 2).told()
        pair.engine.begin("run")
        pair.trainer.call("fill", 2)
        pair.trainer.begin("run", 2)
        for job in pair.trainer, pair.engine:
            assert set(job.told()) == {"stalled"}
        hosts.link("down")
        for connection in pair.trainer.connections + pair.engine.connections:
            connection.send(SHORT)
        failures(pair.trainer.told())
        failures(pair.engine.told())
        assert pair.engine.call("holds") == [1, 1]
        hosts.link("up")
        pair.move(3)

        pair.engine.begin("stall_at", "_verdict").told()
        pair.trainer.begin("stall_at", "_read").told()
        pair.engine.begin("run")
        pair.trainer.call("fill", 4)
        pair.trainer.begin("run", 4)
        first = [job.connections[0] for job in (pair.trainer, pair.engine)]
        for connection in first:
            assert connection.poll(PATIENT)
            assert connection.recv() == "stalled"
        hosts.link("down")
        for connection in first:
            connection.send(SHORT)
        assert [raised(each) for each in pair.trainer.told()] == [4, 4]
        failures(pair.engine.told())
        assert pair.engine.call("holds") == [3, 3]
        hosts.link("up")
        pair.move(5)
    finally:
        pair.close()


def test_the_engine_hosts_the_store_and_starts_anew(tmp_path: Path) -> None:
    """The store goes with it; the trainer, whose run is in the background, finds the next one."""
    jobs = [Job(tmp_path, 1), Job(tmp_path, 1)]
    given = {"address": free_address(), "timeout": LONG, "max_bytes": SMALL}
    try:
        trainer, engine = jobs
        for job, side in ((trainer, "source"), (engine, "target")):
            job.call("hold", None)
            job.call("between", side, host=side == "target", **given)
        for version in (1, 2):
            trainer.call("fill", version)
            engine.begin("run")
            while not all(trainer.call("poll")):
                pass
            trainer.call("begin_run")
            assert raised(engine.told()[0]) == version
            assert trainer.call("end_run") == [(version, True, version)]
            assert engine.call("holds") == [version]
            if version == 1:
                engine.kill()
                trainer.call("wait_at_most", SHORT)
                (said,) = failures(trainer.begin("run").told())
                assert "cannot be reached" in said
                trainer.call("wait_at_most", LONG)
                engine = Job(tmp_path, 1)
                jobs.append(engine)
                engine.call("hold", None)
                engine.call("between", "target", host=True, **given)
    finally:
        for job in jobs:
            job.kill()
