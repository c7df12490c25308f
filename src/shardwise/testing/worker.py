"""`serve`: the process of a rank in a pool. It joins the group, and runs one task after the other."""

from __future__ import annotations

import faulthandler
import gc
import itertools
import os
import random
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined] # documented, yet not declared

from shardwise.comm.group import group_state, tagged_messages
from shardwise.testing.task import Task
from shardwise.torch_private import load_private

_start_folder = os.getcwd()
# NCCL refuses ranks that share a GPU, unless they seem to be on different hosts, connected by the loopback.
DIFFERENT_HOSTS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
CHECK_PEERS_AFTER = 0.1  # seconds before a rank checks its peers; short, for all are on one machine
COLLECTIVE_TIMEOUT = timedelta(hours=1)  # the pool's own timeouts are much shorter


@dataclass(frozen=True)
class Outcome:
    """The result of a task on a rank, or its failure."""

    value: Any
    failure: str | None
    skipped: str | None = None
    spent: bool = False  # whether the rank cannot run another task


def serve(connection: Connection, rank: int, world_size: int, folder: str, backend: str) -> None:
    """Join the group, report it, and run tasks until the pool is closed."""
    _prepare(rank, world_size, Path(folder), backend)
    connection.send(Outcome(None, None))
    for number in itertools.count():
        try:
            task: Task = connection.recv()
        except (EOFError, ConnectionError):
            break  # the pool or its process has ended
        except Exception:
            connection.send(Outcome(None, f"the task could not be read:\n{traceback.format_exc()}"))
            continue
        outcome = _attempt(task, number)
        try:
            connection.send(outcome)
        except Exception:
            connection.send(Outcome(None, f"the result could not be sent:\n{traceback.format_exc()}"))
    with suppress(Exception):  # of semaphores, such as inductor makes: Python warns of those that are left
        util._run_finalizers(0)  # type: ignore[attr-defined] # which the stubs do not declare
    os._exit(0)  # threads of a half-finished collective must not keep the process


def _prepare(rank: int, world_size: int, folder: Path, backend: str) -> None:
    _take_turns()
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # a text file; for `echo`
    stacks = open(folder / f"stack-{rank}", "w")  # noqa: SIM115 # open until the process ends
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started the pool
    torch.set_num_threads(1)
    tagged_messages.PATIENCE = CHECK_PEERS_AFTER
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    if "nccl" in backend:
        _take_gpu(rank, world_size)
    dist.init_process_group(
        backend,
        store=FileStore(str(folder / "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    gc.freeze()


def _take_turns() -> None:
    """Use batch scheduling where the system has it, so that a process never preempts another one on wake-up.

    There are more ranks than cores. gloo's thread spins on a lock that the rank holds while it sends: a receiver that
    preempts the sender, and the spinning thread on the other core, would waste both cores.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # not permitted
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _take_gpu(rank: int, world_size: int) -> None:
    """Make a GPU the current device of this rank, for NCCL."""
    count = torch.cuda.device_count()
    torch.cuda.set_device(rank % count)
    if count < world_size:
        os.environ.update(DIFFERENT_HOSTS, NCCL_HOSTID=f"rank-{rank}")


def _attempt(task: Task, task_number: int) -> Outcome:
    """Run a task from a clean state: same seed, empty output, only the default group."""
    _end_groups()
    os.ftruncate(1, 0)
    os.chdir(_start_folder)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    random.seed(0)
    torch.manual_seed(0)
    default, loaded = dist.group.WORLD, len(sys.modules)
    if default is not None:
        # Whatever some ranks have caught, or have not noticed, in the task before.
        group_state(default).restart_history(task_number)
    try:
        value = task.run()
    except BaseException as error:  # including pytest's outcomes
        if type(error).__name__ in ("Skipped", "SkipTest"):
            return Outcome(None, None, skipped=str(error), spent=_is_spent(default))
        return Outcome(None, _traceback(error))
    finally:
        if default is not None and dist.group.WORLD is default:
            group_state(default).count_epochs()
        sys.stdout.flush()
        gc.collect()
        if len(sys.modules) > loaded:
            gc.freeze()  # so that later collections skip the modules
    if dist.group.WORLD is not default:
        return Outcome(None, "the task left no default process group: use fresh=True for a task that ends it\n")
    return Outcome(value, None, spent=_is_spent(default))


def _is_spent(default: dist.ProcessGroup | None) -> bool:
    """Whether the default group has collectives that never end, so that later ones would hang or fail."""
    return default is not None and bool(group_state(default).history.broken)


def _end_groups() -> None:
    """Destroy the groups of the task before. Only now is every rank done with it: a group must not be destroyed while
    another rank still connects to it."""
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    for group in groups:
        dist.destroy_process_group(group)
    if groups and "torch.distributed.tensor" in sys.modules:
        # Cached results for meshes of those groups must not be used for equal meshes.
        load_private("torch.distributed.tensor.debug._clear_sharding_prop_cache")()


def _traceback(error: BaseException) -> str:
    """The traceback without the frames of the pool."""
    frames, pool = error.__traceback__, str(Path(__file__).parent)
    while frames and frames.tb_next and frames.tb_frame.f_code.co_filename.startswith(pool):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))
