"""TorchRec, where it is installed, shards, trains, saves and loads its tables on the drop-in.

Its packages for CPUs go by names that it does not ask for: `pip install --no-deps torchrec fbgemm-gpu-cpu` in the
versions for the installed torch, with tensordict, torchmetrics, pyre-extensions and what these need.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise import ShardedTensor, dropin
from shardwise.testing import ranks

LR = 0.1


def plain(seed: int) -> Any:
    """Three tables, whole."""
    from torchrec import EmbeddingBagCollection  # type: ignore[import-not-found,unused-ignore] # optional
    from torchrec.modules.embedding_configs import (  # type: ignore[import-not-found,unused-ignore] # optional
        EmbeddingBagConfig,
    )

    torch.manual_seed(seed)
    configs = [
        EmbeddingBagConfig(name=f"t{k}", embedding_dim=8, num_embeddings=13 + k, feature_names=[f"f{k}"])
        for k in range(3)
    ]
    return nn.Sequential(EmbeddingBagCollection(device=torch.device("cpu"), tables=configs))


def sharded(seed: int) -> Any:
    """The same: one table on a rank, one cut by rows, one by columns."""
    from torchrec.distributed import (  # type: ignore[import-not-found,unused-ignore] # optional
        DistributedModelParallel,
        ShardingEnv,
        sharding_plan,
    )
    from torchrec.distributed.embeddingbag import (  # type: ignore[import-not-found,unused-ignore] # optional
        EmbeddingBagCollectionSharder,
    )
    from torchrec.distributed.types import ShardingPlan  # type: ignore[import-not-found,unused-ignore] # optional

    module, sharder, world = plain(seed), EmbeddingBagCollectionSharder(), dist.get_world_size()
    each = {
        "t0": sharding_plan.table_wise(rank=1),
        "t1": sharding_plan.row_wise(),
        "t2": sharding_plan.column_wise(ranks=[0, 1]),
    }
    plan = sharding_plan.construct_module_sharding_plan(
        module[0], each, sharder, local_size=world, world_size=world, device_type="cpu"
    )
    return DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        plan=ShardingPlan({"0": plan}),
        sharders=[sharder],
        device=torch.device("cpu"),
    )


def batch(seed: int) -> Any:
    """Ids for each table, of four samples."""
    from torchrec import KeyedJaggedTensor  # type: ignore[import-not-found,unused-ignore] # optional

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 3, (12,), generator=generator)
    values = torch.randint(0, 13, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor.from_lengths_sync(keys=["f0", "f1", "f2"], values=values, lengths=lengths)


@pytest.mark.skipif(find_spec("torchrec") is None, reason="torchrec is not installed")
@ranks(2, bare=True)
def test_tables_train_and_go_through_a_checkpoint(tmp_path: Path) -> None:
    """Step by step as the whole tables on both batches; what it hands out are our tensors."""
    dropin.install()
    warnings.simplefilter("ignore")  # it uses what torch deprecates
    import torch.distributed.checkpoint as dcp

    twin, model = plain(0), sharded(1)
    for name, tensor in model.state_dict().items():
        assert type(tensor) is ShardedTensor
        tensor.copy_(twin.state_dict()[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(3):
        out = model(batch(2 * step + dist.get_rank())).wait().values()
        torch.testing.assert_close(out, twin(batch(2 * step + dist.get_rank())).values())
        out.pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        twin.zero_grad()
        sum(twin(batch(2 * step + rank)).values().pow(2).sum() for rank in range(2)).backward()
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.sub_(LR * parameter.grad / 2)  # it takes the mean over the ranks
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    other = sharded(2)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    other.load_state_dict(state["model"])
    for one in (model, other):
        for name, tensor in one.state_dict().items():
            torch.testing.assert_close(tensor.full_tensor(), twin.state_dict()[name])
