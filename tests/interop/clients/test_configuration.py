"""The model of a configuration, without weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.interop.clients.models import config, llama

from shardwise.errors import CheckpointError
from shardwise.interop.huggingface.configuration import model_of_config


@pytest.mark.parametrize("name", ["config.json", "llama.json"])
def test_a_model_is_made_of_a_configuration_alone(tmp_path: Path, name: str) -> None:
    """On meta, of the dtype that is asked for or that the configuration has; in training, without caches."""
    given = config()
    given.architectures, given.dtype = ["LlamaForCausalLM"], torch.bfloat16
    given.to_json_file(tmp_path / name)
    path = tmp_path if name == "config.json" else tmp_path / name
    model = model_of_config(path)
    sizes = {key: (one.shape, torch.bfloat16, "meta") for key, one in llama().named_parameters()}
    assert {key: (one.shape, one.dtype, one.device.type) for key, one in model.named_parameters()} == sizes
    assert model.training
    assert not model.config.use_cache
    assert {one.dtype for one in model_of_config(path, torch.float32).parameters()} == {torch.float32}


def test_a_configuration_names_its_class(tmp_path: Path) -> None:
    """Else it says which entry does."""
    config().to_json_file(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r'names no class .*"architectures" of it should, such as'):
        model_of_config(tmp_path)
