"""`shardwise convert`, `extract` and `merge`: what others' own readers read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.tools.cli.states import Cli, holds, plain_state
from torch.distributed.checkpoint import load as load_dcp

import shardwise


def test_convert_goes_between_all_formats(cli: Cli, saved: str) -> None:
    """Others' own readers read what is written, and back again it is the same."""
    model = plain_state()["model"]
    assert cli("convert", saved, "whole.pt", "--to", "torch", "--max-memory", "2KB")[0] == 0  # through mapped files
    loaded = torch.load("whole.pt", weights_only=True)
    assert all(torch.equal(loaded["model"][name], value) for name, value in model.items())
    assert (loaded["history"], loaded["step"]) == ([1, 2.5, "x"], 7)
    assert cli("convert", "whole.pt", "dcp", "--to", "dcp")[0] == 0
    target: dict[str, Any] = {"model": {name: torch.zeros_like(value) for name, value in model.items()}, "step": 0}
    with pytest.warns(UserWarning, match="single process"):
        load_dcp(target, checkpoint_id="dcp", no_dist=True)
    assert all(torch.equal(target["model"][name], value) for name, value in model.items())
    assert target["step"] == 7
    assert cli("convert", "dcp", "own", "--to", "shardwise")[0] == 0
    assert cli("diff", saved, "own")[0] == 0
    code, _, err = cli("convert", "own", "hf", "--to", "safetensors", "--max-shard-size", "4KB")
    assert (code, "4 values left out" in err) == (0, True)
    index = json.loads(Path("hf/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3  # DCP has tied tensors twice
    found = {k: v for file in Path("hf").glob("*.safetensors") for k, v in safetensors.torch.load_file(file).items()}
    assert all(torch.equal(found[f"model.{name}"], value) for name, value in model.items())
    assert cli("diff", saved, "hf", "--only", "model/*")[0] == 0
    rules = ("--only", "model.layers*", "--rename", "model.layers.*.weight=w/*", "--dtype", "bf16")
    assert cli("convert", "hf", "some.safetensors", "--to", "safetensors", *rules)[0] == 0
    some = safetensors.torch.load_file("some.safetensors")
    assert sorted(some) == ["model.layers.1.bias", "w.0", "w.1"]
    assert torch.equal(some["w.1"], model["layers.1.weight"].to(torch.bfloat16))
    assert sorted(os.listdir()) == ["dcp", "hf", "own", "some.safetensors", "whole.pt"]  # and nothing in between


def test_extract_and_merge_put_whole_tensors_into_one_place(cli: Cli, saved: str) -> None:
    """In a file they keep their names; what is merged has no name in common."""
    model = plain_state()["model"]
    code, out, err = cli("extract", saved, "model/layers.1.*", "scale", "some.safetensors")
    assert (code, err, "wrote 3 tensors" in out) == (0, "", True)
    some = safetensors.torch.load_file("some.safetensors")
    assert torch.equal(some["model/layers.1.weight"], model["layers.1.weight"])
    assert sorted(some) == ["model/layers.1.bias", "model/layers.1.weight", "scale"]
    assert cli("merge", saved, "whole.safetensors")[2].count("left out") == 2  # values, and the tied name
    assert torch.equal(safetensors.torch.load_file("whole.safetensors")["model/layers.0.weight"], model["head.weight"])
    shardwise.save({"other": torch.ones(3), "model": {"more": torch.zeros(2)}}, "other")
    assert cli("merge", saved, "other", "both")[0] == 0
    both = plain_state()
    both["model"]["more"], both["other"] = torch.zeros(2), torch.ones(3)
    holds("both", both)
    code, _, err = cli("merge", saved, "both", "third")
    assert (code, "'model/layers.0.weight' is in" in err, os.path.exists("third")) == (2, True, False)


def test_convert_gives_a_folder_that_transformers_loads_or_says_what_is_missing(cli: Cli) -> None:
    """A tied model in a training checkpoint: names, configuration and dtype; logits are those of the model."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8, "bos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, eos_token_id=0)).eval()
    model.config.save_pretrained("base")
    Path("base/tokenizer_config.json").write_text("{}")
    Path("base/model.safetensors").write_text("not copied")
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(6)[None]).logits.sum().backward()
    optimizer.step()
    shardwise.save({"model": model, "optimizer": optimizer, "step": 1}, "run")
    out = cli("convert", "run", "all", "--to", "safetensors")[1]
    assert "names begin with 'model.', which a model's do not: --only 'model/*' --rename 'model/*=*'\n" in out
    assert "there is no 'config.json': --config FOLDER copies" in out
    rules = ("--to", "safetensors", "--only", "model/*", "--rename", "model/*=*")
    out = cli("convert", "run", "folder", *rules, "--config", "base")[1]
    assert ("cannot load it yet" in out, "copied:\n  config.json, tokenizer_config.json\n" in out) == (False, True)
    loaded, about = transformers.AutoModelForCausalLM.from_pretrained("folder", output_loading_info=True)
    assert not any(about.values())
    ids = torch.arange(6)[None]
    assert torch.equal(loaded.eval()(input_ids=ids).logits, model(input_ids=ids).logits)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert cli("convert", "folder", "half", "--to", "safetensors", "--dtype", "bf16")[0] == 0  # with its configuration
    half = transformers.AutoModelForCausalLM.from_pretrained("half")
    assert half.transformer.wte.weight.dtype == torch.bfloat16
    assert "is no folder with a 'config.json'" in cli("convert", "run", "x", *rules, "--config", "all")[2]
    assert "--config is for a folder of safetensors" in cli("convert", "run", "x", "--to", "dcp", "--config", "base")[2]
