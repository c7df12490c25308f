"""The Trainer of transformers with a model in pieces: it trains, saves and resumes as with the plain twin."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.interop.clients.environment import launched
from tests.interop.clients.models import llama, same_parameters, sharded, token_ids, twins
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from shardwise import ShardedTensor, fully_shard
from shardwise.testing import ranks

IDS = token_ids(rows=8)
ROWS = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in IDS]


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    """Three steps of two rows a rank, in their order."""
    return TrainingArguments(
        str(folder),
        use_cpu=True,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        train_sampling_strategy="sequential",
        **{"per_device_train_batch_size": 2, "max_steps": 3, "optim": "sgd", "save_strategy": "no", **options},
    )


def step(plain: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    """One step of the plain twin, with the clipping that the Trainer does."""
    plain.train()
    loss = plain(input_ids=ids, labels=ids).loss
    loss.backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.parametrize("accumulation", [1, 2])
@ranks(2)
def test_the_trainer_trains_a_model_in_pieces(tmp_path: Path, accumulation: int) -> None:
    """With nothing but the usual arguments: losses, norms and parameters of the twin that gets all ranks' batches."""
    model, plain = twins()
    with launched():
        trainer = Trainer(
            model, arguments(tmp_path, gradient_accumulation_steps=accumulation), train_dataset=ROWS, eval_dataset=ROWS
        )
        trainer.train()
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        rows = 4 * accumulation
        expected = [step(plain, optimizer, IDS.roll(-rows * k, 0)[:rows]) for k in range(3)]
        assert logged == pytest.approx(expected, rel=1e-5)  # transformers computes losses in float32
        same_parameters(model, plain)
        plain.eval()
        found = trainer.evaluate()["eval_loss"]
        assert found == pytest.approx(float(plain(input_ids=IDS, labels=IDS).loss.detach()), rel=1e-5)


@pytest.mark.parametrize("accumulation", [1, 2])
@ranks(2)
def test_the_trainer_trains_a_fully_sharded_model(tmp_path: Path, accumulation: int) -> None:
    """With ranks that have other shares of the parameters than of the samples."""
    plain = llama()
    model = fully_shard(copy.deepcopy(plain), weights=[3, 1])
    with launched():
        trainer = Trainer(
            model, arguments(tmp_path, gradient_accumulation_steps=accumulation), train_dataset=ROWS, eval_dataset=ROWS
        )
        trainer.train()
        optimizer, rows = torch.optim.SGD(plain.parameters(), lr=0.1), 4 * accumulation
        expected = [step(plain, optimizer, IDS.roll(-rows * k, 0)[:rows]) for k in range(3)]
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert logged == pytest.approx(expected, rel=1e-5)
        same_parameters(model, plain)
        plain.eval()
        found = trainer.evaluate()["eval_loss"]
        assert found == pytest.approx(float(plain(input_ids=IDS, labels=IDS).loss.detach()), rel=1e-5)


@ranks(2)
def test_the_trainer_resumes_a_fully_sharded_model(tmp_path: Path) -> None:
    """With Adam, in folders that are transformers' own."""
    with launched():
        model = fully_shard(llama())
        options = {"optim": "adamw_torch", "max_steps": 4, "save_steps": 2, "save_strategy": "steps"}
        Trainer(model, arguments(tmp_path / "run", **options), train_dataset=ROWS).train()
        again = fully_shard(llama(), weights=[1, 2])
        trainer = Trainer(again, arguments(tmp_path / "run", **options), train_dataset=ROWS)
        trainer.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoint-4", dtype=torch.float64)
        same_parameters(model, whole)
        same_parameters(again, whole)


@ranks(2)
def test_the_trainer_saves_and_resumes_in_pieces(tmp_path: Path) -> None:
    """With Adam: a run that is interrupted ends as one that is not, and its folders are transformers' own."""
    with launched():
        model = sharded(llama())
        options = {"optim": "adamw_torch", "max_steps": 4, "save_steps": 2, "save_strategy": "steps"}
        Trainer(model, arguments(tmp_path / "run", **options), train_dataset=ROWS).train()
        assert {"config.json", "model.safetensors", "shardwise"} <= set(os.listdir(tmp_path / "run/checkpoint-2"))
        again = sharded(llama())
        nn.init.zeros_(again.lm_head.weight)
        trainer = Trainer(again, arguments(tmp_path / "run", **options), train_dataset=ROWS)
        trainer.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
        assert isinstance(again.lm_head.weight, ShardedTensor)
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoint-4", dtype=torch.float64)
        same_parameters(model, whole)
        same_parameters(again, whole)


def rows_of_epochs(count: int, steps: int) -> list[torch.Tensor]:
    """The ids of each step, four at a time and the rest of an epoch in its last."""
    epoch = list(IDS[:count].split(4))
    return [epoch[k % len(epoch)] for k in range(steps)]


def evaluated(plain: nn.Module, ids: torch.Tensor) -> float:
    """The mean of the losses of four rows at a time, weighted by their number."""
    plain.eval()
    with torch.no_grad():
        return sum(len(one) * float(plain(input_ids=one, labels=one).loss) for one in ids.split(4)) / len(ids)


@pytest.mark.parametrize("options", [{}, {"split_batches": True}, {"even_batches": False}, {"dispatch_batches": True}])
@ranks(2)
def test_losses_over_rows_that_cannot_be_divided(tmp_path: Path, options: dict[str, bool]) -> None:
    """Seven rows on two ranks: in training and evaluation each counts once, as in one process."""
    model, plain = twins()
    size = 4 if "split_batches" in options else 2
    with launched():
        chosen = arguments(
            tmp_path,
            max_steps=4,
            accelerator_config=options,
            per_device_train_batch_size=size,
            per_device_eval_batch_size=size,
        )
        trainer = Trainer(model, chosen, train_dataset=ROWS[:7], eval_dataset=ROWS[:7])
        trainer.train()
        found = trainer.evaluate()["eval_loss"]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = [step(plain, optimizer, ids) for ids in rows_of_epochs(7, 4)]
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(expected, rel=1e-5)  # transformers computes losses in float32
    same_parameters(model, plain)
    assert found == pytest.approx(evaluated(plain, IDS[:7]), rel=1e-5)


@ranks(2)
def test_the_trainer_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """After the first and the third step of two epochs of two steps each: the losses go on as without a stop."""
    plain = llama()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = [step(plain, optimizer, ids) for ids in rows_of_epochs(7, 4)]
    with launched():
        for name in (None, "checkpoint-1", "checkpoint-3"):
            model = sharded(llama())
            chosen = arguments(tmp_path, max_steps=4, save_steps=1, save_strategy="steps")
            trainer = Trainer(model, chosen, train_dataset=ROWS[:7])
            trainer.train(resume_from_checkpoint=None if name is None else str(tmp_path / name))
            logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            assert logged == pytest.approx(expected, rel=1e-5), name
            same_parameters(model, plain)


@ranks(2)
def test_the_trainer_predicts_for_every_row_once(tmp_path: Path) -> None:
    """Seven rows in batches of two on two ranks: the last batch of one of them has one row."""
    model, plain = twins()
    with launched():
        found = Trainer(model, arguments(tmp_path, per_device_eval_batch_size=2)).predict(ROWS[:7])
    torch.testing.assert_close(torch.from_numpy(found.predictions), plain(input_ids=IDS[:7]).logits.detach())
    assert torch.equal(torch.from_numpy(found.label_ids), IDS[:7])
