"""`shardwise verify`: all damage, by tensor, box and file."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from tests.tools.cli.states import Cli

from shardwise.checkpoint.archive import open_archive


def test_verify_lists_all_damage_and_exits_with_1(cli: Cli, saved: str, tmp_path: Path) -> None:
    """Flipped bytes by tensor, box and file; a file that is gone; an index that is cut off."""
    assert cli("verify", saved)[:2] == (0, "whole: 6 tensors, 7.6 KiB in 4 files\n")
    bad = shutil.copytree(saved, tmp_path / "bad")
    with open_archive(bad) as archive:
        for name, row in (("model/layers.0.weight", 1), ("model/layers.1.weight", 2)):
            location: Any = archive.locate(archive.index.tensors[name], row)
            with open(bad / location.file, "r+b") as file:
                file.seek(location.begin + 7)
                flipped = file.read(1)[0] ^ 16
                file.seek(location.begin + 7)
                file.write(bytes([flipped]))
    code, out, _ = cli("verify", bad, "--json")
    damage = json.loads(out)["damage"]
    assert (code, len(damage)) == (1, 2)
    assert "[10:20, 0:24] of tensor 'model/layers.0.weight' in file 'rank-00001" in damage[0]
    assert "[0:24, 20:30] of tensor 'model/layers.1.weight' in file 'rank-00002" in damage[1]
    for command in (["diff", saved, bad], ["reshard", bad, "n", "--ranks", "2"], ["convert", bad, "n", "--to", "dcp"]):
        code, out, err = cli(*command)
        assert (code, out, os.path.exists("n")) == (2, "", False)
        assert "is damaged: [10:20, 0:24] of tensor 'model/layers.0.weight'" in err
    os.remove(next(bad.glob("rank-00003*")))
    assert cli("verify", bad)[1].count("\n") == 4
    shutil.copy(next(Path(saved).glob("rank-00003*")), bad)
    os.truncate(bad / "index.json", 90)
    code, out, _ = cli("verify", bad)
    assert (code, "is not JSON" in out) == (1, True)


def test_verify_says_once_what_is_wrong_with_a_file(cli: Cli, saved: str, tmp_path: Path) -> None:
    """One line for a file, with the tensors in it, however many boxes it has; a foreign file that is cut off, too."""
    bad = shutil.copytree(saved, tmp_path / "bad")
    first, second = sorted(bad.glob("rank-*"))[:2]
    os.truncate(first, 100)
    second.unlink()
    code, out, _ = cli("verify", bad)
    whole = (Path(saved) / first.name).stat().st_size
    assert (code, out.splitlines()[0]) == (1, f"{bad} is damaged:")
    assert [line.split("; in it: ")[0] for line in out.splitlines()[1:]] == [
        f"  its file '{first.name}' is cut off or changed, it has 100 bytes and was written with {whole:,}",
        f"  its file '{second.name}' is missing",
    ]
    assert "in it: 'model/layers.0.weight', 'model/layers.1.weight'" in out
    assert cli("convert", saved, "hf", "--to", "safetensors")[0] == 0
    file = Path("hf/model.safetensors")
    size = file.stat().st_size
    os.truncate(file, size - 10)
    code, out, _ = cli("verify", "hf")
    assert (code, f"it has {size - 10:,} bytes and its header speaks of {size:,}" in out) == (1, True)
    assert cli("verify", "nowhere")[0] == 2
