"""What is wrong between two jobs: what their ranks give, who else writes into the store, who has the same name."""

from __future__ import annotations

import gc
import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import chunks
from tests.patience import PATIENT, until

import shardwise
from shardwise import StateTransfer
from shardwise.errors import RankMismatchError, TransferError
from shardwise.state_transfer import jobs
from shardwise.testing import ranks

WEIGHT = torch.arange(12.0).reshape(4, 3)
TIMEOUT = PATIENT  # of what should come


def free_port() -> int:
    """At which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def together(*calls: Callable[[], object]) -> list[Any]:
    """What jobs in threads of one process give, or raise."""

    def attempt(call: Callable[[], object]) -> object:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(attempt, calls))


@ranks(2)
def test_what_one_rank_gives_wrong_all_ranks_of_its_job_hear() -> None:
    """And at once: they do not wait for it. A host that nobody knows is told when it is called, not before."""
    odd, port = dist.get_rank() == 1, free_port()
    shared = [port]
    dist.broadcast_object_list(shared)
    give: Any = {"source": {"w": WEIGHT}, "address": f"127.0.0.1:{shared[0]}"}
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"address": "nowhere"}, ValueError, "the address of a store is"),
        ({"address": "127.0.0.1:70000"}, ValueError, "the address of a store is"),
        ({"address": 5}, ValueError, "the address of a store is"),
        ({"timeout": float("nan")}, ValueError, "the timeout is a number of seconds above 0"),
        ({"timeout": float("inf")}, ValueError, "the timeout is a number of seconds above 0"),
        ({"timeout": None}, ValueError, "the timeout is a number of seconds above 0"),
        ({"backend": "mpi"}, ValueError, "the backend between jobs is"),
        ({"name": ""}, ValueError, "the name of a pair of jobs is a string"),
        ({"source": None}, ValueError, "one gives a source and the other a target"),
        ({"target": {"w": WEIGHT}}, ValueError, "one gives a source and the other a target"),
        ({"source": None, "target": {"w": WEIGHT}}, RankMismatchError, "side=source on rank:0 does not match"),
        ({"timeout": 5.0}, RankMismatchError, "timeout property does not match"),
    ]
    for change, kind, words in wrong:
        with pytest.raises(kind, match=words):
            StateTransfer.between(**give | change if odd else give)
    nobody = StateTransfer.between(source={"w": WEIGHT}, address=f"host.invalid:{shared[0]}", timeout=0.2)
    with pytest.raises(TransferError, match=r"the store at host\.invalid:\d+ cannot be reached"):
        nobody.run()


def test_who_else_writes_into_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of others are passed over; a job of another version, or of another backend, is told as such. What is not
    used any more hangs up."""
    port = free_port()
    address, target = f"127.0.0.1:{port}", torch.zeros(4, 3)
    source = StateTransfer.between(source={"w": WEIGHT}, address=address, timeout=TIMEOUT)
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=TIMEOUT), wait_for_workers=False)
    others = ["\xff", "[1, 2]", '{"answer": "x"}', "7"]
    others.append(json.dumps({"answer": "x", "epoch": None, "ranks": [0], "protocol": jobs.PROTOCOL}))
    for number, words in enumerate(others, 1):
        store.set(f"shardwise/weights/target/call/{number}", words)
        store.add("shardwise/weights/target/calls", 1)
        assert not source.poll()
    with pytest.raises(TransferError, match="have not met yet"):
        shardwise.draw(source)
    engine = StateTransfer.between(target={"w": target}, address=address, timeout=TIMEOUT)
    late = partial(StateTransfer.between, target={"w": torch.zeros(4, 3)}, address=address)
    handle = source.run(wait=False)  # reads what was written by others
    engine.run()
    handle.wait()
    assert torch.equal(target, WEIGHT)
    assert "the source's ranks come first: rank 1 is rank 0 of the target." in source.explain()
    said = together(source.run, late(timeout=TIMEOUT, backend="nccl").run)
    assert [str(one).partition("\n")[0] for one in said] == [
        "the transfer's backend differs: backend=gloo on rank 0 of the source, backend=nccl on rank 0 of the target"
    ] * 2
    other = late(timeout=TIMEOUT)
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "PROTOCOL", 0)  # of whoever calls
        calling = other.run(wait=False)
        while not source.poll():
            pass
    with pytest.raises(TransferError, match="versions of shardwise that do not talk to each other"):
        source.run()
    with pytest.raises(TransferError, match="versions of shardwise that do not talk to each other"):
        calling.wait()
    calling = engine.run(wait=False)
    while not source.poll():  # which does not wait for an engine that it has lost
        pass
    source.run()
    calling.wait()
    assert engine.version == source.version
    threads = [thread for thread in threading.enumerate() if thread.name == "shardwise store"]
    assert len(threads) >= 2  # one for each job
    del source, engine, other, late, handle, calling, said
    gc.collect()
    for thread in threads:  # nobody has closed anything
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def test_a_target_that_had_given_up_when_it_was_found() -> None:
    """It was not met: a source that was lost since waits for it, as it may come again."""
    port, prefix = free_port(), "shardwise/weights"
    source = StateTransfer.between(source={"w": WEIGHT}, address=f"127.0.0.1:{port}", timeout=TIMEOUT)
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=TIMEOUT), wait_for_workers=False)

    def call(number: int, **changes: Any) -> None:
        words = {"answer": f"answer {number}", "epoch": None, "ranks": [0], "protocol": jobs.PROTOCOL, "seen": 1}
        store.set(f"{prefix}/target/call/{number}", json.dumps(words | changes))
        store.add(f"{prefix}/target/calls", 1)

    def give_up() -> None:
        until(lambda: store.check([f"{prefix}/source/waiting"]))
        store.add(f"{prefix}/target/seen", 1)
        store.set(f"{prefix}/answer 1", "{}")  # before anybody has answered
        call(1)
        until(lambda: store.add(f"{prefix}/target/read", 0))
        call(2, protocol=0)  # which ends the source's call

    said = together(source.run, give_up)
    assert "do not talk to each other" in str(said[0])
    call(3, protocol=0)
    with pytest.raises(TransferError, match="do not talk to each other"):  # and not that it is still gone
        source.run()


@ranks(3)
def test_a_rank_of_the_engine_that_cannot_use_what_arrives() -> None:
    """All ranks of the engine raise, none of them has the version, and the next one goes to all of them."""
    groups = dist.new_group([0]), dist.new_group([1, 2])
    side = int(dist.get_rank() > 0)
    shared = [free_port()]
    dist.broadcast_object_list(shared)
    refusing, got = True, list[list[float]]()

    def quantise(name: str, boxes: list[torch.Tensor]) -> None:
        if refusing and dist.get_rank() == 2:
            raise ValueError("no room")
        got.append(boxes[0].flatten().tolist())

    options: Any = {"address": f"127.0.0.1:{shared[0]}", "process_group": groups[side], "timeout": TIMEOUT}
    if side:
        layout = chunks(0, 1, 2).layout(WEIGHT.shape)
        transfer = StateTransfer.between(target={"w": layout}, on_arrival=quantise, **options)
        with pytest.raises(ValueError, match="no room"):
            transfer.run()
        assert transfer.version == 0
        refusing = False
        transfer.run()
        assert transfer.version == 2
        begin = 2 * (dist.get_rank() - 1)
        assert got[-1] == WEIGHT[begin : begin + 2].flatten().tolist()
    else:
        transfer = StateTransfer.between(source={"w": WEIGHT}, **options)
        transfer.run()
        transfer.run()


def test_a_transfer_that_was_closed() -> None:
    """Says so at once, and does not look for a store that it has taken along."""
    transfer = StateTransfer.between(source={"w": WEIGHT}, address=f"127.0.0.1:{free_port()}")
    transfer.close()
    transfer.close()
    with pytest.raises(TransferError, match="was closed: make another one"):
        transfer.run()
    assert not transfer.poll()
