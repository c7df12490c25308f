"""accelerate: `prepare` takes a sharded model, an optimizer and a loader, and training is that of the plain twin."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration, ParallelismConfig  # type: ignore[import-untyped] # it has no types
from safetensors.torch import load_file
from tests.interop.clients.environment import launched
from tests.interop.clients.models import same_gradients, same_parameters, token_ids, twins, whole
from torch import nn
from torch.utils.data import DataLoader

from shardwise import ShardedOptimizer, ShardedTensor, fully_shard, load, save
from shardwise.errors import CheckpointError
from shardwise.testing import ranks

IDS = token_ids(rows=8)
ROWS = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in IDS]


@pytest.mark.parametrize("shuffle", [False, True])
@ranks(2)
def test_prepared_training_is_that_of_the_twin(shuffle: bool) -> None:
    """Each rank gets its own batches; the loss and the gradients are those of all of them together."""
    with launched():
        accelerator = Accelerator(cpu=True)
        model, plain = twins()
        ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain))
        loader: Any = DataLoader(ROWS, batch_size=2, shuffle=shuffle)
        prepared, ours, loader = accelerator.prepare(model, ours, loader)
        assert prepared is model
        seen = []
        for batch in loader:
            assert isinstance(batch["input_ids"], ShardedTensor)
            assert batch["input_ids"].shape == (4, 6)
            assert batch["input_ids"].local_tensor().shape == (2, 6)
            loss = prepared(**batch).loss
            accelerator.backward(loss)
            ids = accelerator.gather(batch["input_ids"])
            seen.append(ids)
            expected = plain(input_ids=ids, labels=ids).loss
            expected.backward()
            torch.testing.assert_close(accelerator.gather(loss), expected)
            same_gradients(model, plain)
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            assert float(accelerator.clip_grad_norm_(model.parameters(), 0.5)) == pytest.approx(float(norm), rel=1e-12)
            for one in (ours, theirs):
                one.step()
                one.zero_grad()
        assert torch.equal(torch.cat(seen).sort(0).values, IDS.sort(0).values)
        same_parameters(model, plain)
        logits = accelerator.gather_for_metrics(prepared(**batch).logits)
        torch.testing.assert_close(logits, plain(input_ids=ids).logits)


@pytest.mark.parametrize("accumulated", [1, 2])
@ranks(2)
def test_fully_sharded_models(accumulated: int) -> None:
    """`prepare` takes one; gradients may be accumulated, clipped, and are those of all batches together."""
    with launched():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
        plain = twins()[1]
        model = fully_shard(copy.deepcopy(plain), weights=[1, 2])
        ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain))
        model, ours, loader = accelerator.prepare(model, ours, DataLoader(ROWS, batch_size=2))
        for number, batch in enumerate(loader):
            ids = accelerator.gather(batch["input_ids"])
            (plain(input_ids=ids, labels=ids).loss / accumulated).backward()
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if (number + 1) % accumulated == 0:
                    same_gradients(model, plain)
                    nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    theirs.step()
                    theirs.zero_grad()
                ours.step()
                ours.zero_grad()
        same_parameters(model, plain)


@ranks(2)
def test_batches_are_joined_also_by_a_loader_that_was_prepared_before() -> None:
    """As the Trainer does it. Beside a plain model, batches stay each rank's own."""
    with launched():
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(ROWS, batch_size=2))
        assert all(type(batch["labels"]) is torch.Tensor for batch in loader)
        accelerator.prepare(twins()[0])
        assert all(isinstance(batch["labels"], ShardedTensor) for batch in loader)


@ranks(2)
def test_gradients_are_accumulated() -> None:
    """Over two batches of each rank, as over the four of them."""
    with launched():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, plain = twins()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(ROWS, batch_size=2))
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
        plain(input_ids=IDS, labels=IDS).loss.backward()
        same_gradients(model, plain)


@ranks(2)
def test_batches_that_cannot_be_joined_are_an_error_on_every_rank() -> None:
    """Rows that each rank pads to a length of its own."""
    with launched():
        accelerator = Accelerator(cpu=True)
        data: Any = [torch.ones(3 + k % 2, dtype=torch.int64) for k in range(4)]
        _, loader = accelerator.prepare(twins()[0], DataLoader(data, batch_size=1))
        with pytest.raises(ValueError, match=r"same size along dim 1.*\[1, 3\] on rank 0, \[1, 4\] on rank 1"):
            next(iter(loader))
    assert dist.get_world_size() == 2


@ranks(2)
def test_batches_that_one_rank_deals_out_are_joined_too() -> None:
    """With `dispatch_batches`, the first rank reads for all."""
    with launched():
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True), cpu=True)
        _, loader = accelerator.prepare(twins()[0], DataLoader(ROWS, batch_size=2))
        found = [accelerator.gather(batch["input_ids"]) for batch in loader]
        assert torch.equal(torch.cat(found), IDS)


@ranks(2)
def test_prepared_models_and_optimizers_are_saved_on_every_rank(tmp_path: Path) -> None:
    """The model as a folder; for both, accelerate's own way is refused on every rank with the lines that do it."""
    with launched():
        accelerator = Accelerator(cpu=True)
        model, plain = twins()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        with pytest.raises(
            CheckpointError, match=r'shardwise\.save\(\{"model": model, "optimizer": optimizer\.optimizer'
        ):
            accelerator.save_state(tmp_path / "state")
        with pytest.raises(CheckpointError, match=r"shardwise\.load\(.* on every rank"):
            accelerator.load_state(tmp_path / "state")
        save({"model": model, "optimizer": optimizer.optimizer}, tmp_path / "state")
        accelerator.save_model(model, tmp_path / "folder")
        found = load_file(tmp_path / "folder/model.safetensors")
        assert {name: value.shape for name, value in found.items()} == {
            name: value.shape for name, value in plain.state_dict().items()
        }
        other = twins()[0]
        state = {"model": other, "optimizer": torch.optim.AdamW(other.parameters())}
        load(state, tmp_path / "state")
        for name, value in other.state_dict().items():
            assert torch.equal(whole(value).detach(), found[name]), name


@ranks(2)
def test_with_tensor_parallelism_declared_every_rank_gets_the_same_batches() -> None:
    """Accelerate then deals out to groups of ranks: what a group gets is one batch, and stays plain."""
    with launched():
        with mock.patch.object(ParallelismConfig, "_validate_accelerator"):  # which wants GPUs
            accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
        model, loader = accelerator.prepare(twins()[0], DataLoader(ROWS, batch_size=4))
        for k, batch in enumerate(loader):
            assert torch.equal(batch["input_ids"], IDS[4 * k : 4 * k + 4])
            plain = twins()[1]
            model.zero_grad()
            accelerator.backward(model(**batch).loss)
            plain(**batch).loss.backward()
            same_gradients(model, plain)


@ranks(2)
def test_a_sharded_optimizer_is_prepared_too() -> None:
    """AdamW over the shards, step by step with torch's over the twin."""
    with launched():
        accelerator = Accelerator(cpu=True)
        model, plain = twins()
        ours: Any = ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, lr=0.01)
        theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
        model, ours, loader = accelerator.prepare(model, ours, DataLoader(ROWS, batch_size=2))
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            ids = accelerator.gather(batch["input_ids"])
            plain(input_ids=ids, labels=ids).loss.backward()
            for one in (ours, theirs):
                one.step()
                one.zero_grad()
        same_parameters(model, plain)
