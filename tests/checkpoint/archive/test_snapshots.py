"""Snapshots of torchsnapshot, in a file of their own: it needs ranks that have not imported torch's old system."""

from __future__ import annotations

import json
import warnings
from collections import OrderedDict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import PLAIN, chunks
from tests.checkpoint.archive.locations import of_all_kinds, same, state_of

from shardwise import dropin
from shardwise.checkpoint.archive.formats import torchsnapshot
from shardwise.checkpoint.archive.opening import Format, format_of
from shardwise.checkpoint.storage.local import LocalStorage
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks


@pytest.mark.skipif(find_spec("torchsnapshot") is None, reason="torchsnapshot is not installed")
@ranks(2, bare=True)
def test_snapshots_of_two_ranks(tmp_path: Path) -> None:
    """Sharded, replicated, chunked and per-rank entries; all dtypes; values in the manifest and beside it; as YAML."""
    dropin.install()
    warnings.simplefilter("ignore")  # it uses what torch deprecates
    import yaml  # type: ignore[import-untyped,unused-ignore] # its types are a package of their own
    from torchsnapshot import Snapshot, StateDict  # type: ignore[import-not-found,unused-ignore] # optional
    from torchsnapshot.knobs import (  # type: ignore[import-not-found,unused-ignore] # optional
        override_is_batching_disabled,
        override_max_chunk_size_bytes,
    )

    rank = dist.get_rank()
    kinds = {name: tensor for name, tensor in of_all_kinds().items() if "float8" not in name and "uint" not in name}
    kinds["torch.uint8"] = of_all_kinds()["torch.uint8"]
    del kinds["empty"]  # torchsnapshot cannot write it
    shared: dict[str, Any] = {
        "kinds": kinds,
        "list": [torch.ones(2), {3: torch.zeros(1), "a/b%": 7}, []],
        "ordered": OrderedDict(x=1.5, y="text", z=b"bytes", t=True),
        "object": {1.5: (1, 2)},
        "none": None,
    }

    def take(path: Path) -> None:
        state = StateDict(**shared, sharded=shard_tensor(PLAIN, chunks(0, 1, 0)), own=torch.full((2,), rank), step=3)
        state["seed"] = rank
        replicated = [f"state/{name}/**" for name in ("kinds", "list")] + ["state/none", "state/object"]
        Snapshot.take(str(path), {"state": state}, replicated=replicated)

    with override_max_chunk_size_bytes(64):
        take(tmp_path / "chunked")
    with override_is_batching_disabled(True):
        take(tmp_path / "plain")
    if rank:
        return
    own = {str(k): {"state": {"own": torch.full((2,), k), "seed": k}} for k in range(2)}
    common = {**shared, "ordered": dict(shared["ordered"]), "sharded": PLAIN, "step": 3}
    for name in ("chunked", "plain"):
        storage = LocalStorage(tmp_path / name)
        assert format_of(storage) is Format.TORCHSNAPSHOT
        found = state_of(torchsnapshot.build_index(storage), storage)
        assert same(found, {"state": common, **own})
    words = json.loads((tmp_path / "plain" / ".snapshot_metadata").read_text())
    (tmp_path / "plain" / ".snapshot_metadata").write_text(yaml.safe_dump(words, sort_keys=False))
    assert same(state_of(torchsnapshot.build_index(storage), storage), found)


def test_dtensors_of_snapshots(tmp_path: Path) -> None:
    """As newer versions write them: of replicas, one counts; int keys, empty containers and lists of one rank stay."""
    (tmp_path / "sharded").mkdir()
    tensor = {"type": "Tensor", "serializer": "buffer_protocol", "dtype": "torch.float32", "replicated": False}
    shards = []
    for row in range(7):
        (tmp_path / "sharded" / f"w{row}").write_bytes(PLAIN[row].numpy().tobytes())
        place = {**tensor, "location": f"sharded/w{row}", "shape": [1, 6]}
        shards.append({"offsets": [row, 0], "sizes": [1, 6], "tensor": place})
    own = {"type": "int", "serialized_value": "5", "replicated": False, "readable": None}
    manifest: dict[str, Any] = {}
    for rank, held in ((0, shards[:5]), (1, shards[3:])):
        manifest[f"{rank}/app"] = {"type": "dict", "keys": ["w", "opt", "none", "own"]}
        manifest[f"{rank}/app/w"] = {"type": "DTensor", "shards": held, "mesh": [0, 1], "dim_map": [[0], [-1]]}
        manifest[f"{rank}/app/opt"] = {"type": "dict", "keys": [0]}
        manifest[f"{rank}/app/opt/0"] = own
        manifest[f"{rank}/app/none"] = {"type": "list"}
        manifest[f"{rank}/app/own"] = {"type": "list"}
        manifest[f"{rank}/app/own/0"] = {**own, "serialized_value": str(rank)}
    words = {"version": "0.2", "world_size": 2, "manifest": manifest}
    (tmp_path / ".snapshot_metadata").write_text(json.dumps(words))
    storage = LocalStorage(tmp_path)
    common = {"w": PLAIN, "opt": {0: 5}, "none": []}
    expected = {"app": common, "0": {"app": {"own": [0]}}, "1": {"app": {"own": [1]}}}
    assert same(state_of(torchsnapshot.build_index(storage), storage), expected)
