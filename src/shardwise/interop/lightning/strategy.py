"""`ShardwiseStrategy`: trains sharded models in Lightning's Trainer.

Lightning's own strategies wrap a model with DDP or FSDP, or treat each process as the only one. This strategy wraps
nothing, joins the batches of all ranks, and saves checkpoints as a folder from which any number of ranks can resume.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from shardwise.checkpoint import load, save
from shardwise.comm.group import or_default
from shardwise.tensor import ShardedTensor
from shardwise.tensor.batches import join_batch
from shardwise.torch_private import pytree

STATE = "state"  # in a checkpoint's folder: the model and the optimizers, in shardwise's format
REST = "rest.pt"  # everything else: loops, callbacks, schedulers, hyperparameters


class ShardwiseStrategy(DDPStrategy):  # type: ignore[misc] # Lightning may not be installed
    """One process for each rank, which torchrun or the Trainer starts, and a model that is sharded over them.

    With ``join_batches``, the default, each rank's batch is its own, and a step is one step over all of them. Without,
    batches stay as they are: then every rank must read the same, with ``Trainer(use_distributed_sampler=False)``::

        Trainer(devices=2, strategy=ShardwiseStrategy(), ...)
    """

    strategy_name = "shardwise"

    def __init__(self, *args: Any, join_batches: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._join_batches = join_batches

    # The model and its batches --------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Prepare the model and the optimizers, without DDP and without broadcasting parameters."""
        Strategy.setup(self, trainer)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return model

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """The batch on this rank's device, joined with those of the other ranks."""
        batch = super().batch_to_device(batch, device, dataloader_idx)
        return join_batch(batch, or_default(None)) if self._join_batches else batch

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over all ranks; a sharded tensor is one value already."""
        if isinstance(tensor, ShardedTensor):
            return tensor.full_tensor()
        return super().reduce(tensor, group, reduce_op)

    # Checkpoints ----------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: a checkpoint is read into the model and the optimizers."""
        return True

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Empty, for `save_checkpoint` saves the optimizers themselves."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder. Every rank writes its shards."""
        rest = {name: value for name, value in checkpoint.items() if name != "state_dict"}
        rest = pytree.tree_map_only(ShardedTensor, lambda value: value.full_tensor(), rest)
        state: dict[str, Any] = {"model": checkpoint["state_dict"]}
        if "optimizer_states" in checkpoint:
            state["optimizers"] = list(self.optimizers)
        save(state, os.path.join(filepath, STATE))
        super().save_checkpoint(rest, os.path.join(filepath, REST), storage_options)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a folder into the model, and during training into the optimizers; gives everything else."""
        rest: dict[str, Any] = super().load_checkpoint(os.path.join(checkpoint_path, REST), weights_only)
        module = self.lightning_module
        state: dict[str, Any] = {"model": module}
        with_optimizers = module.trainer.state.fn == TrainerFn.FITTING and "optimizer_states" in rest
        if with_optimizers:
            state["optimizers"] = list(self.optimizers)
        load(state, os.path.join(checkpoint_path, STATE), only=None if with_optimizers else "model/*")
        return {**rest, "state_dict": {}}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` has loaded the model."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_checkpoint` has loaded the optimizers."""
