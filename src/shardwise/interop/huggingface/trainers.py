"""Patches of transformers' Trainer: with a sharded model there is one loss, and every rank saves and loads."""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

import torch

from shardwise import checkpoint
from shardwise.interop.huggingface.loading import load_pretrained
from shardwise.interop.huggingface.models import is_sharded
from shardwise.interop.huggingface.saving import save_pretrained
from shardwise.patching import Function, replace_when_loaded
from shardwise.tensor import ShardedTensor
from shardwise.tensor.batch_forms import row_count

TRAINER = "transformers.trainer"
EVALUATED = "_shardwise_evaluated"  # an attribute of a Trainer during evaluation: losses with their numbers of rows
STATE = "shardwise"  # the folder in a checkpoint of the Trainer that holds the optimizer


def _compute_one_loss(theirs: Function) -> Function:
    """`Trainer.compute_loss` without the factor for an average over ranks, for there is none."""

    @functools.wraps(theirs)
    def compute(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_sharded(model):
            return theirs(self, model, *args, **kwargs)
        set_by_user = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False
        try:
            return theirs(self, model, *args, **kwargs)
        finally:
            self.args.average_tokens_across_devices = set_by_user

    return compute


def _predict_plain_loss(theirs: Function) -> Function:
    """`Trainer.prediction_step` with a plain loss, recorded with its number of rows."""

    @functools.wraps(theirs)
    def predict(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss, *rest = theirs(self, model, inputs, *args, **kwargs)
        if isinstance(loss, ShardedTensor):
            loss = loss.full_tensor()
            getattr(self, EVALUATED, []).append((loss.detach().double(), row_count(inputs)))
        return loss, *rest

    return predict


def _evaluate_weighted(theirs: Function) -> Function:
    """`Trainer.evaluation_loop`, whose loss is the mean over all rows.

    The Trainer weights losses by its configured batch size; joined batches may have other sizes.
    """

    @functools.wraps(theirs)
    def evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        noted: list[tuple[torch.Tensor, int]] = []
        setattr(self, EVALUATED, noted)
        try:
            result = theirs(self, *args, **kwargs)
        finally:
            delattr(self, EVALUATED)
        given = inspect.signature(theirs).bind(self, *args, **kwargs)
        given.apply_defaults()
        rows = sum(count for _, count in noted)
        if rows:
            mean = sum(loss * count for loss, count in noted) / rows
            result.metrics[f"{given.arguments['metric_key_prefix']}_loss"] = float(mean)
        return result

    return evaluate


def _save_by_all(theirs: Function) -> Function:
    """`Trainer.save_model`; of a sharded model, every rank writes its shards, and one rank writes whole adapters."""

    @functools.wraps(theirs)
    def save(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> Any:
        if not is_sharded(self.model):
            return theirs(self, output_dir, _internal_call)
        folder, model = output_dir or self.args.output_dir, self.accelerator.unwrap_model(self.model)
        if hasattr(model, "peft_config"):
            model.save_pretrained(folder, is_main_process=self.args.should_save)
        else:
            save_pretrained(model, folder)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, os.path.join(folder, "training_args.bin"))
        return None

    return save


def _load_by_all(theirs: Function) -> Function:
    """`Trainer._load_from_checkpoint`; of a sharded model, every rank reads its shards."""

    @functools.wraps(theirs)
    def load(self: Any, resume_from_checkpoint: str, model: Any = None) -> Any:
        target = self.model if model is None else model
        if not is_sharded(target) or hasattr(target, "peft_config"):
            return theirs(self, resume_from_checkpoint, model)
        return load_pretrained(target, resume_from_checkpoint)

    return load


def _save_optimizer_by_all(theirs: Function) -> Function:
    """`Trainer._save_optimizer_and_scheduler`, with sharded state."""

    @functools.wraps(theirs)
    def save(self: Any, output_dir: str) -> Any:
        if not is_sharded(self.model):
            return theirs(self, output_dir)
        return checkpoint.save(_state_of(self), os.path.join(output_dir, STATE))

    return save


def _load_optimizer_by_all(theirs: Function) -> Function:
    """`Trainer._load_optimizer_and_scheduler`, with sharded state."""

    @functools.wraps(theirs)
    def load(self: Any, folder: str | None) -> Any:
        if folder is None or not is_sharded(self.model) or not os.path.isdir(os.path.join(folder, STATE)):
            return theirs(self, folder)
        return checkpoint.load(_state_of(self), os.path.join(folder, STATE))

    return load


def _state_of(trainer: Any) -> dict[str, Any]:
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # without accelerate's wrapper
    return {"optimizer": optimizer, "scheduler": trainer.lr_scheduler}


replace_when_loaded(TRAINER, "Trainer.compute_loss", _compute_one_loss)
replace_when_loaded(TRAINER, "Trainer.prediction_step", _predict_plain_loss)
replace_when_loaded(TRAINER, "Trainer.evaluation_loop", _evaluate_weighted)
replace_when_loaded(TRAINER, "Trainer.save_model", _save_by_all)
replace_when_loaded(TRAINER, "Trainer._load_from_checkpoint", _load_by_all)
replace_when_loaded(TRAINER, "Trainer._save_optimizer_and_scheduler", _save_optimizer_by_all)
replace_when_loaded(TRAINER, "Trainer._load_optimizer_and_scheduler", _load_optimizer_by_all)
