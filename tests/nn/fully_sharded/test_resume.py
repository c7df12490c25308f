"""Fifty steps in three worlds of other sizes, shares and samples, resumed from checkpoints, beside one plain run."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.nn.fully_sharded.cases import Model, batch_of, mine, whole

import shardwise
from shardwise.testing import run_on_ranks

STEPS, SAMPLES = 50, 6
WORLDS = (  # until which step, weights of the ranks, samples of the ranks
    (20, [3, 1, 2], [1, 0, 5]),
    (35, [1, 1], [2, 4]),
    (50, [1, 0, 0, 2], [1, 1, 3, 1]),
)


def train_on(begin: int, end: int, weights: list[int], samples: list[int], folder: str) -> list[float]:
    """Some steps; from the last checkpoint if there is one, and to another one. Gives the losses."""
    torch.manual_seed(begin)
    model = shardwise.fully_shard(Model().double(), weights=weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"model": model, "optimizer": optimizer}
    if begin:
        shardwise.load(state, f"{folder}/{begin}")
    losses = []
    for step in range(begin, end):
        ids, labels = (mine(one, samples) for one in batch_of(step, samples))
        optimizer.zero_grad()
        loss = model(ids, labels)
        loss.backward()
        optimizer.step()
        losses.append(whole(loss).item())
    shardwise.save(state, f"{folder}/{end}")
    return losses


def test_three_worlds(tmp_path: Path) -> None:
    """The losses are those of the plain model, to the rounding of float64."""
    torch.manual_seed(0)
    plain = Model().double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for step in range(STEPS):
        ids, labels = batch_of(step, [SAMPLES])
        optimizer.zero_grad()
        loss = plain(ids, labels)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    found, begin = [], 0
    for end, weights, samples in WORLDS:
        found += run_on_ranks(len(weights), train_on, begin, end, weights, samples, str(tmp_path))[0]
        begin = end
    ours, theirs = (torch.tensor(one, dtype=torch.float64) for one in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=0)


def return_to(folder: str) -> None:
    """Three steps, a checkpoint, three steps; then back to the checkpoint with the same optimizer, and three steps."""
    torch.manual_seed(0)
    model = shardwise.fully_shard(Model().double(), weights=[2, 1])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=0.1)
    state = {"model": model, "optimizer": optimizer}

    def train(begin: int) -> list[torch.Tensor]:
        for step in range(begin, begin + 3):
            ids, labels = (mine(one, [1, 2]) for one in batch_of(step, [1, 2]))
            optimizer.zero_grad()
            model(ids, labels).backward()
            optimizer.step()
        return [one.full_tensor() for one in model.parameters()]

    train(0)
    shardwise.save(state, folder)
    expected = train(3)
    shardwise.load(state, folder)
    torch.testing.assert_close(train(3), expected, rtol=1e-12, atol=1e-12)


def test_an_optimizer_returns_to_a_checkpoint(tmp_path: Path) -> None:
    """Also its count of steps, after it has taken more."""
    run_on_ranks(2, return_to, str(tmp_path))
