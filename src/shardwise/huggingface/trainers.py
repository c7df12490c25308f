"""What the Trainer of transformers does with a sharded model: it computes one loss, and every rank saves and loads."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from shardwise import checkpoint
from shardwise.huggingface.loading import load_pretrained
from shardwise.huggingface.models import is_sharded
from shardwise.huggingface.saving import save_pretrained
from shardwise.interop.loading import Function, replace_when_loaded

TRAINER = "transformers.trainer"
STATE = "shardwise"  # the folder in a checkpoint of the Trainer that holds the optimizer


def _one_loss(theirs: Function) -> Function:
    """`Trainer.compute_loss` without the factor that makes up for an average over ranks: there is none."""

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


def _saved_by_all(theirs: Function) -> Function:
    """`Trainer.save_model`, in which every rank writes what it has; of adapters, one rank writes the whole."""

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


def _loaded_by_all(theirs: Function) -> Function:
    """`Trainer._load_from_checkpoint`, in which every rank reads what it will have."""

    @functools.wraps(theirs)
    def load(self: Any, resume_from_checkpoint: str, model: Any = None) -> Any:
        target = self.model if model is None else model
        if not is_sharded(target) or hasattr(target, "peft_config"):
            return theirs(self, resume_from_checkpoint, model)
        return load_pretrained(target, resume_from_checkpoint)

    return load


def _optimizer_saved_by_all(theirs: Function) -> Function:
    """`Trainer._save_optimizer_and_scheduler`, with state in pieces."""

    @functools.wraps(theirs)
    def save(self: Any, output_dir: str) -> Any:
        if not is_sharded(self.model):
            return theirs(self, output_dir)
        return checkpoint.save(_state_of(self), os.path.join(output_dir, STATE))

    return save


def _optimizer_loaded_by_all(theirs: Function) -> Function:
    """`Trainer._load_optimizer_and_scheduler`, likewise."""

    @functools.wraps(theirs)
    def load(self: Any, folder: str | None) -> Any:
        if folder is None or not is_sharded(self.model) or not os.path.isdir(os.path.join(folder, STATE)):
            return theirs(self, folder)
        return checkpoint.load(_state_of(self), os.path.join(folder, STATE))

    return load


def _state_of(trainer: Any) -> dict[str, Any]:
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # without what accelerate puts around it
    return {"optimizer": optimizer, "scheduler": trainer.lr_scheduler}


replace_when_loaded(TRAINER, "Trainer.compute_loss", _one_loss)
replace_when_loaded(TRAINER, "Trainer.save_model", _saved_by_all)
replace_when_loaded(TRAINER, "Trainer._load_from_checkpoint", _loaded_by_all)
replace_when_loaded(TRAINER, "Trainer._save_optimizer_and_scheduler", _optimizer_saved_by_all)
replace_when_loaded(TRAINER, "Trainer._load_optimizer_and_scheduler", _optimizer_loaded_by_all)
