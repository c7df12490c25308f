"""Which ranks should have which experts, so that all get their share of the tokens. Pure.

Free room goes to copies of the experts with the most tokens. Then each copy, the one with the most tokens first, goes
to the rank that has the least to do. Last, ranks of equal room exchange all they would get, so that little must move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardwise.layout.geometry import IntArray
from shardwise.nn.experts.route import Holders

Loads = Sequence[float]


def loads_of(holders: Holders, counts: Loads, ranks: Sequence[int], shares: Loads) -> list[float]:
    """What each rank has to do, in tokens by its share of the work, if copies share their tokens alike."""
    total = dict.fromkeys(ranks, 0.0)
    for count, where in zip(counts, holders, strict=True):
        for rank in where:
            total[rank] += count / len(where)
    return [total[rank] / max(share, 1e-12) for rank, share in zip(ranks, shares, strict=True)]


def imbalance(holders: Holders, counts: Loads, ranks: Sequence[int], shares: Loads) -> float:
    """How much longer the fullest rank computes than if all had their shares; 1 is as even as can be."""
    whole = sum(counts) / sum(shares)
    return max(loads_of(holders, counts, ranks, shares)) / whole if whole else 1.0


def balanced(holders: Holders, counts: Loads, room: Mapping[int, int], shares: Mapping[int, float]) -> Holders:
    """Other ranks for the experts, none with more than it has room for; the given ones if these fit and are as good."""
    ranks = list(room)
    found, spare = None, sum(min(number, len(counts)) for number in room.values()) - len(counts)
    while found is None:  # one copy of each finds room
        found = _least_full_first(counts, _copies(counts, room, spare), room, shares)
        spare -= 1
    better = _closest(found, holders, room, shares)
    order = [shares[rank] for rank in ranks]
    now, then = (imbalance(one, counts, ranks, order) for one in (holders, better))
    fits = all(sum(rank in where for where in holders) <= number for rank, number in room.items())
    return better if then < now * (1 - 1e-9) or not fits else holders


def _copies(counts: Loads, room: Mapping[int, int], spare: int) -> list[int]:
    """How many copies each expert has: one, and so many more, of whichever has most tokens for each of its copies."""
    copies = [1] * len(counts)
    most = sum(number > 0 for number in room.values())
    for _ in range(spare):
        fewer = [expert for expert, number in enumerate(copies) if number < most]
        if not fewer:
            break
        copies[max(fewer, key=lambda expert: counts[expert] / copies[expert])] += 1
    return copies


def _least_full_first(
    counts: Loads, copies: Sequence[int], room: Mapping[int, int], shares: Mapping[int, float]
) -> list[set[int]] | None:
    """For each rank, in the order of ``room``, its experts; None if they find no room. Those with copies go first."""
    ranks = list(room)
    bins: list[set[int]] = [set() for _ in ranks]
    loads = np.zeros(len(ranks))
    parts = np.array([max(shares[rank], 1e-12) for rank in ranks])
    each = [count / number for count, number in zip(counts, copies, strict=True)]
    for expert in sorted(range(len(counts)), key=lambda expert: (copies[expert] == 1, -each[expert])):
        for _ in range(copies[expert]):
            free = [k for k, rank in enumerate(ranks) if len(bins[k]) < room[rank] and expert not in bins[k]]
            if not free:
                return None
            best = min(free, key=lambda k: ((loads[k] + each[expert]) / parts[k], len(bins[k])))
            bins[best].add(expert)
            loads[best] += each[expert]
    return bins


def _closest(
    bins: Sequence[set[int]], holders: Holders, room: Mapping[int, int], shares: Mapping[int, float]
) -> Holders:
    """These experts on ranks, of which those of equal room and share are exchanged so that most experts stay."""
    ranks = list(room)
    now = [{expert for expert, where in enumerate(holders) if rank in where} for rank in ranks]
    kinds = [(room[rank], shares[rank]) for rank in ranks]
    stay: IntArray = np.array([[len(experts & own) for own in now] for experts in bins], dtype=np.int64)
    alike = np.array([[one == other for other in kinds] for one in kinds])
    score = np.where(alike, stay, -1)
    found: list[list[int]] = [[] for _ in holders]
    for _ in ranks:
        taken, rank = divmod(int(score.argmax()), len(ranks))
        for expert in bins[taken]:
            found[expert].append(ranks[rank])
        score[taken, :] = score[:, rank] = -2
    return tuple(tuple(sorted(where)) for where in found)
