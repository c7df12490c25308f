"""Lightning's Trainer with a sharded model: it trains as the plain twin, saves in pieces, resumes on other ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.pages import Page
from tests.torchrun import run_script
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import shardwise
from shardwise import ShardedTensor
from shardwise.errors import CheckpointError, UnsupportedOpError
from shardwise.testing import ranks, run_on_ranks

pytest.importorskip("lightning")
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from shardwise.lightning import ShardwiseStrategy

DATA = [(torch.arange(6.0).double() * k / 10, torch.tensor([k % 3]).double()) for k in range(8)]


class Model(LightningModule):
    """Two layers, which are sharded by rows; with Adam, and a rate that decays."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.losses: list[float] = []

    def training_step(self, batch: Any, number: int) -> Any:
        """The mean squared error, logged as one number."""
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        plain = loss.full_tensor() if isinstance(loss, ShardedTensor) else loss
        self.losses.append(float(plain.detach()))
        self.log("loss", plain.detach(), on_epoch=True, batch_size=4)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        """The same, of a batch that is held back."""
        x, y = batch
        self.log("held_back", nn.functional.mse_loss(self.layers(x), y).full_tensor(), batch_size=len(x))

    def configure_optimizers(self) -> Any:
        """As usual."""
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def sharded() -> Model:
    """The weights in pieces, biases plain."""
    return shardwise.shard_module(Model(), {"layers.0.weight": 0, "layers.2.weight": 1})


@contextmanager
def launched() -> Iterator[None]:
    """What torchrun says to Lightning, said to the ranks of a pool."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    said = {"LOCAL_RANK": rank, "RANK": rank, "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": world, "WORLD_SIZE": world}
    said |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "pool"}
    with mock.patch.dict(os.environ, said), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning gives advice by warnings
        yield


def trainer(folder: Path | str, epochs: int, **options: Any) -> Trainer:
    """Without anything that is printed."""
    usual = {"accelerator": "cpu", "devices": dist.get_world_size(), "strategy": ShardwiseStrategy()}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(max_epochs=epochs, default_root_dir=str(folder), **{**usual, **quiet, **options})


def loader(batch_size: int) -> Any:
    """In order."""
    return DataLoader(DATA, batch_size=batch_size, shuffle=False)


def twin(*worlds: int) -> Model:
    """The plain model, trained for epochs on the rows that so many ranks have in each step."""
    model = Model()
    [optimizer], [scheduler] = model.configure_optimizers()
    rows = [torch.stack([row[part] for row in DATA]) for part in range(2)]
    for epoch, world in enumerate(worlds):
        samplers: list[Any] = [DistributedSampler(DATA, world, rank, shuffle=True) for rank in range(world)]
        for sampler in samplers:
            sampler.set_epoch(epoch)  # as Lightning does
        order = torch.tensor([list(sampler) for sampler in samplers])
        for turn in order.split(4 // world, dim=1):
            numbers = turn.reshape(-1)
            loss = nn.functional.mse_loss(model.layers(rows[0][numbers]), rows[1][numbers])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.losses.append(float(loss.detach()))
        scheduler.step()
    return model


def same(model: Model, plain: Model) -> None:
    """Assert that both have the same parameters."""
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        found = ours.full_tensor() if isinstance(ours, ShardedTensor) else ours
        torch.testing.assert_close(found, theirs, msg=lambda text, name=name: f"{name}: {text}")


def train(folder: str) -> None:
    """Two epochs, with a checkpoint after each, and the best by a value that is logged."""
    with launched():
        model = sharded()
        kept = ModelCheckpoint(folder, filename="{epoch}", monitor="held_back", save_top_k=-1)
        started = trainer(folder, 2, callbacks=[kept])
        started.fit(model, loader(4 // dist.get_world_size()), loader(4))
        plain = twin(2, 2)
        assert model.losses == pytest.approx(plain.losses, rel=1e-12)
        same(model, plain)
        assert isinstance(model.layers[0].weight, ShardedTensor)
        held_back = float(started.callback_metrics["held_back"])
        x, y = (torch.stack([row[part] for row in DATA]) for part in range(2))
        assert held_back == pytest.approx(float(nn.functional.mse_loss(plain.layers(x), y).detach()), rel=1e-6)
    assert sorted(os.listdir(folder)) == ["epoch=0.ckpt", "epoch=1.ckpt"]
    assert kept.best_model_path


def resume(folder: str) -> None:
    """From the first checkpoint to the end of the third epoch: as without a stop. Also the weights alone."""
    with launched():
        model = sharded()
        nn.init.zeros_(model.layers[0].bias)
        trainer(folder, 3).fit(model, loader(4 // dist.get_world_size()), ckpt_path=f"{folder}/epoch=0.ckpt")
        plain = twin(2, dist.get_world_size(), dist.get_world_size())
        assert model.losses == pytest.approx(plain.losses[2:], rel=1e-12)
        same(model, plain)
        other = sharded()
        trainer(folder, 1).validate(other, loader(4), ckpt_path=f"{folder}/epoch=1.ckpt", verbose=False)
        same(other, twin(2, 2))


def test_a_training_is_that_of_the_twin_and_goes_on_with_other_ranks(tmp_path: Path) -> None:
    """Two ranks train and save, two and four resume; one process reads the weights."""
    run_on_ranks(2, train, str(tmp_path))
    run_on_ranks(2, resume, str(tmp_path))
    run_on_ranks(4, resume, str(tmp_path))
    model = Model()
    shardwise.load({"model": model}, tmp_path / "epoch=1.ckpt/state", only="model/*")
    assert not torch.equal(model.layers[0].weight, Model().layers[0].weight)


def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    """Trained, resumed, and loaded without Lightning, by the command that it shows."""
    page = Page("howto/lightning.md")
    assert page.commands == [("2", "train.py")]
    (tmp_path / "train.py").write_text(page.files["train.py"])
    run_on_ranks(2, run_launched, str(tmp_path / "train.py"), str(tmp_path))
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt"]


def run_launched(script: str, folder: str) -> None:
    """The script, without the warnings by which Lightning gives advice."""
    with launched():
        run_script(script, folder)


@ranks(2)
def test_other_strategies_say_what_to_do(tmp_path: Path) -> None:
    """DDP wraps a model that needs none; with one device each, every rank would write the same file."""
    with launched():
        with pytest.raises(UnsupportedOpError, match=r"In Lightning, Trainer\(.*ShardwiseStrategy"):
            trainer(tmp_path, 1, strategy="ddp").fit(sharded(), loader(2))
        same_path = ModelCheckpoint(str(tmp_path), filename="model", enable_version_counter=False)
        alone = trainer(tmp_path, 1, devices=1, strategy="auto", callbacks=[same_path])

        def fit() -> None:
            alone.fit(sharded(), loader(4))
            shardwise.check()

        with pytest.raises(CheckpointError, match=r"rank \d is saving its shards.*ShardwiseStrategy"):
            fit()
