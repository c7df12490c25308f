"""The guide for migrating: its table of names is the drop-in's. Run this file to write the table anew."""

from __future__ import annotations

from pathlib import Path

import shardwise
from shardwise.dropin import TABLE
from shardwise.tensor.dispatch import registry
from shardwise.tensor.remote import ids

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "old-names.md"
BEGIN, END = "<!-- table of names: begin -->\n", "<!-- table of names: end -->\n"
REGISTRIES = {
    "shardwise.tensor.dispatch.registry.overrides": registry.overrides,
    "shardwise.tensor.dispatch.registry.built_in": registry.built_in,
    "shardwise.tensor.remote.ids.tensors": ids.tensors,
}


def our_name(value: object) -> str:
    """Where to import it from now: `shardwise` itself, if it is public."""
    for name in shardwise.__all__:
        if getattr(shardwise, name) is value:
            return f"shardwise.{name}"
    for name, held in REGISTRIES.items():
        if held is value:
            return name
    return f"{value.__module__}.{value.__qualname__}"


def table() -> str:
    """One row for each old name: the modules that have it, and ours."""
    modules: dict[tuple[str, str], list[str]] = {}
    for path, names in TABLE.items():
        for name, value in names.items():
            modules.setdefault((name, our_name(value)), []).append(path or "_shard")
    rows = [
        f"| `{old}` | {' '.join(f'`{path}`' for path in paths)} | `{new}` |\n" for (old, new), paths in modules.items()
    ]
    return "| old name | in | now |\n|---|---|---|\n" + "".join(sorted(rows, key=str.casefold))


def test_the_guide_has_every_old_name_and_where_it_is_now() -> None:
    """Exactly the drop-in's table. `python -m tests.dropin.test_guide` writes it anew."""
    text = GUIDE.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == table()


if __name__ == "__main__":
    before, _, rest = GUIDE.read_text().partition(BEGIN)
    GUIDE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
