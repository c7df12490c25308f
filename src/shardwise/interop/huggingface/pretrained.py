"""`load`: the model of a Hugging Face folder, made in pieces: on meta first, then sharded, then filled."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.checkpoint.archive.formats.assembly import parse_json
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.storage import Storage, storage_at
from shardwise.checkpoint.storage.protocol import read_file
from shardwise.comm.group import Fields
from shardwise.errors import CheckpointError, PlanKindError
from shardwise.interop.huggingface.configuration import MOST_BYTES, class_of, read_config, safe_on_meta
from shardwise.interop.huggingface.loading import load_pretrained, weights_index
from shardwise.nn.buffers import fill_buffers
from shardwise.nn.fully_sharded import FullyShard
from shardwise.nn.modules import shard_module
from shardwise.nn.plans import columns, fully_sharded, rows, tensor_parallel

GENERATION = "generation_config.json"
PLANS: Mapping[str, Callable[..., Any]] = {
    "tensor_parallel": tensor_parallel,
    "fully_sharded": fully_sharded,
    "rows": rows,
    "columns": columns,
}
FULLY_SHARD = "fully_shard"


def load(
    folder: str | os.PathLike[str] | Storage,
    plan: Any,
    *,
    dtype: torch.dtype | str = "auto",
    model_class: Any = None,
    config: Any = None,
    process_group: ProcessGroup | None = None,
) -> Any:
    """The transformers model of a folder, in pieces, in eval mode, as `from_pretrained` gives it whole.

    Every rank of the group calls it. The model is made from the folder's configuration on ``meta``, sharded as the plan
    says, and filled: each rank reads what it will hold, so no rank ever has the whole model. Buffers that no folder
    holds, such as those of rotary embeddings, are made anew::

        model = shardwise.huggingface.load("llama", "tensor_parallel")

    ``plan`` is anything that `shard_module` takes, with `plans.FullyShard`; or a function that makes a plan of the
    model, such as ``lambda model: plans.tensor_parallel(model, mesh["tp"])``; or a name: of `shardwise.plans`
    ``"tensor_parallel"``, ``"fully_sharded"``, ``"rows"``, ``"columns"``, or ``"fully_shard"``.

    The dtype is by default that of the configuration, or of the weights where that has none. The class is the
    configuration's; ``model_class`` names another, such as ``AutoModel``, and ``config`` is taken instead of the
    folder's. The folder holds safetensors files, or the older ``pytorch_model.bin``, and all parameters of the model:
    where some are missing, as of a new head, every rank raises and names them.
    """
    ranks = Ranks.of(process_group, "huggingface.load")

    def find() -> tuple[_Maker, Fields, None]:
        _require_known_name(plan)
        maker = _Maker.of(storage_at(folder), str(folder), model_class, config, dtype)
        return maker, {"model": maker.name, "dtype": str(maker.dtype)}, None

    maker, _ = ranks.in_step(find)
    with torch.device("meta"), safe_on_meta():
        model = maker.make()
    maker.keep_in_float32(model)
    shard_module(model, _plan_of(plan, model, process_group), process_group=ranks.group)
    fill_buffers(model, maker.make, process_group=ranks.group)
    load_pretrained(model, folder, process_group=ranks.group)
    maker.configure_generation(model)
    return model.eval()


@dataclass(frozen=True)
class _Maker:
    """Makes the model of a folder, without its weights."""

    storage: Storage
    name: str  # of the class
    factory: Callable[..., Any]
    config: Any
    dtype: torch.dtype

    @staticmethod
    def of(storage: Storage, folder: str, model_class: Any, config: Any, dtype: torch.dtype | str) -> _Maker:
        """By the folder's configuration, unless another one is given."""
        config = copy.deepcopy(config) if config is not None else read_config(storage)
        if isinstance(config, Mapping):
            raise CheckpointError("config is a configuration of transformers, such as LlamaConfig(...), found a dict")
        if getattr(config, "quantization_config", None):
            raise CheckpointError(f"'{storage}' holds quantised weights, which are not read in pieces")
        model_class = model_class or class_of(config, storage)
        if not hasattr(model_class, "from_config") and not hasattr(model_class, "_from_config"):
            raise CheckpointError(
                f"model_class is a class of transformers, such as AutoModel; found {model_class!r:.50}"
            )
        config.name_or_path = folder
        if dtype == "auto":
            dtype = getattr(config, "dtype", None) or _dtype_of_weights(storage)
        found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if not isinstance(found, torch.dtype):
            raise CheckpointError(f"dtype is one of torch's, its name, or 'auto'; found {dtype!r:.50}")
        factory = getattr(model_class, "from_config", None) or model_class._from_config  # of an Auto class, or a model
        return _Maker(storage, model_class.__name__, factory, config, found)

    def make(self) -> Any:
        """A new model, on the device of the context."""
        return self.factory(copy.deepcopy(self.config), dtype=self.dtype)

    def keep_in_float32(self, model: nn.Module) -> None:
        """Parameters that `from_pretrained` keeps in float32 where the others are of 16 bits."""
        plan: dict[str, torch.dtype] = getattr(model, "_get_dtype_plan", lambda _: {})(self.dtype)
        for pattern, dtype in plan.items():
            known = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
            for name, parameter in model.named_parameters():
                if known.search(name):
                    parameter.data = parameter.data.to(dtype)

    def configure_generation(self, model: Any) -> None:
        """The folder's settings for `generate`, if it has any."""
        if hasattr(model, "generation_config") and GENERATION in self.storage.names():
            words = parse_json(read_file(self.storage, GENERATION, most=MOST_BYTES), f"'{GENERATION}'")
            model.generation_config = type(model.generation_config).from_dict(words)


def _require_known_name(plan: Any) -> None:
    if isinstance(plan, str) and plan not in (*PLANS, FULLY_SHARD):
        known = ", ".join(map(repr, (*PLANS, FULLY_SHARD)))
        raise PlanKindError(f"the names of plans are {known}; found {plan!r:.50}")


def _plan_of(plan: Any, model: nn.Module, process_group: ProcessGroup | None) -> Any:
    """A plan that `shard_module` takes."""
    if plan is FullyShard or plan == FULLY_SHARD:
        return FullyShard()
    if isinstance(plan, str):
        return PLANS[plan](model, process_group=process_group)
    is_function = callable(plan) and not isinstance(plan, Mapping | FullyShard)
    return plan(model) if is_function else plan


def _dtype_of_weights(storage: Storage) -> torch.dtype:
    """The dtype of the first tensor of floats."""
    found = (stored.dtype for stored in weights_index(storage).tensors.values() if stored.dtype.is_floating_point)
    return next(found, torch.get_default_dtype())
