"""Which rank should play which part in the destination, so that the fewest elements move.

Renaming the ranks of the destination is an assignment problem: rank r takes the part of rank p, and keeps what it
already holds of it. It is solved exactly by successive shortest augmenting paths (the Hungarian method).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardwise.layout import Layout
from shardwise.layout.geometry import intersections
from shardwise.layout.placement import Placement


def relabel(src: Layout, dst: Layout) -> Layout:
    """The destination with its ranks exchanged among themselves such that as much as possible stays where it is."""
    ranks = dst.places.different_ranks[dst.places.different_ranks >= 0].tolist()
    number = {rank: k for k, rank in enumerate(ranks)}
    kept = np.zeros((len(ranks), len(ranks)), dtype=np.int64)  # by rank, and part it might take
    i, j = intersections(src.boxes, dst.boxes)
    low = np.maximum(src.boxes.offsets[i], dst.boxes.offsets[j])
    high = np.minimum(src.boxes.ends[i], dst.boxes.ends[j])
    volume = np.prod(high - low, axis=1)
    for rank, part, count in zip(src.ranks[i].tolist(), dst.ranks[j].tolist(), volume.tolist(), strict=True):
        if rank in number and part in number:
            kept[number[rank], number[part]] += count
    part_of = assign(-kept)
    if sum(kept[k, part_of[k]] for k in range(len(ranks))) <= np.trace(kept):
        return dst  # nothing to be gained
    taker = {ranks[part]: ranks[k] for k, part in enumerate(part_of.tolist())}
    device = {place.rank: place.device for place in dst.places}

    def taken(place: Placement) -> Placement:
        if place.rank is None:
            return place
        return Placement(device[taker[place.rank]], taker[place.rank])

    return dst.moved(taken)


def assign(cost: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each row of a square matrix its column, such that the sum of the chosen entries is least."""
    n = len(cost)
    row_price, column_price = np.zeros(n + 1), np.zeros(n + 1)
    row_of = np.zeros(n + 1, dtype=np.int64)  # 1-based; column 0 stands for the row being placed
    for row in range(1, n + 1):
        row_of[0], column = row, 0
        shortest = np.full(n + 1, np.inf)
        before = np.zeros(n + 1, dtype=np.int64)
        seen = np.zeros(n + 1, dtype=bool)
        while row_of[column]:
            seen[column] = True
            reached = row_of[column]
            reduced = cost[reached - 1] - row_price[reached] - column_price[1:]
            better = ~seen[1:] & (reduced < shortest[1:])
            shortest[1:][better], before[1:][better] = reduced[better], column
            nearest = int(np.argmin(np.where(seen, np.inf, shortest)))
            step = shortest[nearest]
            row_price[row_of[seen]] += step
            column_price[seen] -= step
            shortest[~seen] -= step
            column = nearest
        while column:
            row_of[column] = row_of[before[column]]
            column = int(before[column])
    columns = np.empty(n, dtype=np.int64)
    columns[row_of[1:] - 1] = np.arange(n)
    return columns
