"""The Trainer of transformers with a model in pieces: it trains, saves and resumes as with the plain twin."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.clients.environment import launched
from tests.clients.models import llama, same_parameters, sharded, token_ids, twins
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from shardwise import ShardedTensor
from shardwise.testing import ranks

IDS = token_ids(rows=8)
ROWS = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in IDS]


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    """Three steps of two rows a rank, in their order."""
    return TrainingArguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        train_sampling_strategy="sequential",
        **{"max_steps": 3, "optim": "sgd", "save_strategy": "no", **options},
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
@ranks(2, timeout=120)
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


@ranks(2, timeout=120)
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


@ranks(2, timeout=120)
def test_the_trainer_predicts_for_every_row_once(tmp_path: Path) -> None:
    """Seven rows in batches of two on two ranks: one is dealt out twice, and comes back once."""
    model, plain = twins()
    with launched():
        found = Trainer(model, arguments(tmp_path, per_device_eval_batch_size=2)).predict(ROWS[:7])
    torch.testing.assert_close(torch.from_numpy(found.predictions), plain(input_ids=IDS[:7]).logits.detach())
    assert torch.equal(torch.from_numpy(found.label_ids), IDS[:7])
