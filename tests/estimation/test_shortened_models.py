"""Plans of models whose blocks are not all alike, or that do not run with fewer of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tests.estimation.test_auto import BATCH, device, wide
from torch import nn

from shardwise import plans
from shardwise.estimation.planning.work import Work, work_of


def work(model: nn.Module) -> Work:
    """That trains a model."""
    return work_of(model, BATCH, "sgd", None, None)


class TwoLists(nn.Module):
    """An encoder and a decoder."""

    def __init__(self, encoders: int, decoders: int) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.ModuleList(wide(encoders)), nn.ModuleList(wide(decoders))


@pytest.mark.parametrize(("encoders", "decoders"), [(12, 6), (6, 12), (12, 12)])
def test_the_longest_list_is_shortened(encoders: int, decoders: int) -> None:
    """And one that is as long, for costs are worked out for so many blocks; no shorter one."""
    model = TwoLists(encoders, decoders)
    with work(model).shortened(3):
        assert len(model.encoder) == (3 if encoders == 12 else 6)
        assert len(model.decoder) == (3 if decoders == 12 else 6)
    assert (len(model.encoder), len(model.decoder)) == (encoders, decoders)


def test_layers_of_other_sizes_are_no_blocks() -> None:
    """A list whose members have parameters of other sizes is not shortened, though all are of one class."""
    sizes = [64, 8, 8, 8, 96, 96, 64]
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(one, other) for one, other in pairwise(sizes)])
    assert work(model).blocks == 1
    plan = plans.auto(model, devices=[device("one", 1e9)] * 2, batch=BATCH, recompute=False)
    assert plan.chosen.seconds == pytest.approx(plan.estimate().seconds, rel=0.02)


class ByIndex(nn.Module):
    """A model that counts its blocks itself."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks, self.count = nn.ModuleList(wide(blocks)), blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block after another."""
        for place in range(self.count):
            x = self.blocks[place](x)
        return x


class AllTogether(nn.Module):
    """A model whose head takes what all blocks give."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(wide(blocks)), nn.Linear(blocks * BATCH.shape[1], 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of all blocks."""
        found: list[torch.Tensor] = []
        for block in self.blocks:
            found.append(block(found[-1] if found else x))
        return self.head(torch.cat(found, -1))  # type: ignore[no-any-return] # torch's


@pytest.mark.parametrize("made", [ByIndex, AllTogether])
def test_a_model_that_does_not_run_with_fewer_blocks(made: type[nn.Module]) -> None:
    """Is probed with all of them."""
    with torch.device("meta"):
        model = made(5)
    plan = plans.auto(model, devices=[device("one", 1e9)] * 2, batch=BATCH, recompute=False)
    assert plan.chosen.seconds == pytest.approx(plan.estimate().seconds, rel=0.02)
    assert plan.work.probed == (5,)
