"""Transfers that are collectives, carried out by ranks of any backend and compared with the plain tensor."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from tests.cases import SIZE, SPECS, places

from shardwise import ChunkShardingSpec, GridShardingSpec, Layout, ShardingSpec
from shardwise.comm.group.call_history import CallFingerprint
from shardwise.comm.group.members import rank_array
from shardwise.comm.transfer import make_plan, move
from shardwise.comm.transfer.all_reduce import sum_replicas
from shardwise.comm.transfer.recognise import recognised

SAID = CallFingerprint({"verb": "add up replicas"})
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int32, torch.int16, torch.bool)


def specs(device: str, ranks: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...], ShardingSpec]]:
    """Even, uneven by little and by much, by either dim, on grids, out of order, several boxes on a rank, on one."""
    where = places(*ranks, device=device)
    yield "rows", (8, 6), ChunkShardingSpec(0, where)
    yield "columns", (3, 8), ChunkShardingSpec(1, where)
    yield "rows out of order", (8, 6), ChunkShardingSpec(0, where[::-1])
    yield "filled up", (5, 399), ChunkShardingSpec(1, where)
    yield "uneven rows", (7, 3), ChunkShardingSpec(0, where)
    yield "uneven columns", (3, 7), ChunkShardingSpec(1, where)
    yield "two on each", (16, 3), ChunkShardingSpec(0, [*where, *where])
    yield "on one", (7, 6), ChunkShardingSpec(1, [where[-1], where[-1]])
    yield "a vector", (len(ranks) * 3,), ChunkShardingSpec(0, where)
    if len(ranks) == 4:
        yield "grid", (4, 6), GridShardingSpec((1, 0), [where[:2], where[2:]])
        if device == "cpu":
            yield from ((name, SIZE, spec) for name, spec in SPECS.items())


def value(size: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Small whole numbers, so that every sum is exact."""
    made = (torch.arange(torch.Size(size).numel()).view(size) * 7 + rank * 3) % 11
    return made.to(dtype) * (1 + 2j) if dtype.is_complex else made.to(dtype)


def check(device: str, group: dist.ProcessGroup, *, dtypes: tuple[torch.dtype, ...] = DTYPES) -> dict[str, str]:
    """All-gathers, broadcasts and their ways back, in all of these; gives the collective that each was taken for."""
    ranks, here = tuple(rank_array(group).tolist()), dist.get_rank()
    taken: dict[str, str] = {}
    for name, size, spec in specs(device, ranks):
        parts, whole = spec.layout(size), Layout.whole(size, places(*ranks, device=device))
        plan = make_plan(parts, whole)
        found = recognised(plan, rank_array(group))
        taken[name] = "none" if found is None else found.name
        for dtype in dtypes:
            plain = value(size, dtype, 0).to(device)
            mine = [plain[parts.index(row)].contiguous() for row in parts.rows_on(here)]
            strided = [one.mT.contiguous().mT if one.ndim > 1 else one for one in mine]
            outs = [torch.empty(size[::-1], dtype=dtype, device=device).permute(*range(len(size))[::-1])]
            moves = [
                move(plan, mine, group, dtype=dtype),
                move(plan, strided, group, dtype=dtype),
                move(plan, mine, group, dtype=dtype, outs=outs),
            ]
            for moving in moves:
                (all_of_it,) = moving.wait()
                assert torch.equal(all_of_it, plain), (name, dtype)
            if dtype == torch.bool:
                continue
            brought = value(size, dtype, here).to(device)
            total = sum(value(size, torch.complex128, rank) for rank in ranks).to(device)
            total = (total if dtype.is_complex else total.real).to(dtype)
            for back in (brought, brought.mT.contiguous().mT if brought.ndim > 1 else brought):
                before = back.clone()
                sums = move(plan.reverse(), [back], group, dtype=dtype).wait()
                assert torch.equal(back, before), (name, dtype)
                for row, one in zip(parts.rows_on(here), sums, strict=True):
                    assert torch.equal(one, total[parts.index(row)]), (name, dtype)
            (everywhere,) = sum_replicas(whole, [brought], group, dtype=dtype, said=SAID)
            assert torch.equal(everywhere, total), (name, dtype)
    return taken
