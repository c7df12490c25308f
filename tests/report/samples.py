"""Reports as a real job would give them: a small transformer on 4 ranks, a large one on 1,024."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cache

from shardwise.report import (
    Alive,
    BoxOnRank,
    Memory,
    ModuleCost,
    ModuleRow,
    ParameterRow,
    PlanRow,
    RankPart,
    Report,
    Run,
    Span,
)

GIB = 1 << 30
PARTS = (("attn.qkv", "Linear", 3), ("attn.out", "Linear", 1), ("mlp.up", "Linear", 4), ("mlp.down", "Linear", 4))


@cache
def small() -> Report:
    """Predicted and measured steps on 4 ranks, with plans to choose from."""
    runs = [
        _run("predicted", 4, layers=12, hidden=2048, groups=2),
        _run("measured", 4, layers=12, hidden=2048, groups=4),
    ]
    plans = [
        PlanRow("fully_shard, units of 1 block", 0.412, 21 * GIB, 24 * GIB, True, True, "fastest plan that fits"),
        PlanRow(
            "fully_shard, units of 4 blocks", 0.398, 27 * GIB, 24 * GIB, False, False, "3.0 GiB too much at the peak"
        ),
        PlanRow("column and row cuts", 0.561, 18 * GIB, 24 * GIB, True, False, "sends 2.1 times as many bytes"),
        PlanRow("replicated", None, None, 24 * GIB, None, False, "not estimated: parameters alone exceed the device"),
    ]
    notes = [
        "Kernels of ops without a formula are timed as copies of their bytes.",
        "Links: 24 GiB/s between any two ranks.",
    ]
    return Report("GPT 1.3B, batch 8 × 2,048", runs, _modules(12, 2048, 4), plans, notes)


@cache
def large() -> Report:
    """A predicted step on 1,024 ranks with 700 parameters; it does not fit on the first group."""
    run = _run("predicted", 1024, layers=88, hidden=12288, groups=8, capacity=80 * GIB, full=86)
    return Report("Transformer 175B, 1,024 ranks", [run], _modules(88, 12288, 1024))


def tiny(name: str = "model") -> Report:
    """One rank with one of everything, under any name."""
    memory = Memory((0.0, 1.0), {"parameters": (4, 8)}, 8, 1.0, [Alive("parameters", name, name, 8, 1)], [(0.5, name)])
    part = RankPart(
        (0,), name, 16, 1.0, 2, 3, 3, memory, [Span("compute", name, name, 0, 1)], [ModuleCost(name, name, 1, 2, 3, 4)]
    )
    row = ModuleRow(name, name, [ParameterRow(name, (2,), name, 8, [BoxOnRank(0, (0,), (2,))], name)])
    plan = PlanRow(name, 1.0, 8, 16, True, True, name)
    return Report(name, [Run(name, 1, [part], [(0, 0, 3)])], [row], [plan], [name])


def _run(
    name: str, world: int, *, layers: int, hidden: int, groups: int, capacity: int = 24 * GIB, full: int = 20
) -> Run:
    """Ranks in groups: each has a little more to do than the next."""
    draw = random.Random(name)
    slow = 1.0 if name == "predicted" else 1.08
    per = world // groups
    parts = []
    for group in range(groups):
        scale = slow * (1 + 0.02 * (groups - group - 1)) * draw.uniform(0.99, 1.01)
        spans = _spans(layers, hidden, scale, draw)
        peak = full * scale * (1 - 0.03 * group)
        memory = _memory(spans[-1].end, layers, int(peak * GIB), draw)
        modules = _costs(spans, hidden)
        flops, sent = sum(s.flops for s in spans), sum(s.bytes for s in spans)
        device = "NVIDIA H100 80GB HBM3" if world > 4 else "NVIDIA L4"
        ranks = range(group * per, (group + 1) * per)
        parts.append(RankPart(ranks, device, capacity, spans[-1].end, flops, sent, sent, memory, spans, modules))
    return Run(name, world, parts, _links(world, parts[0].sent))


def _spans(layers: int, hidden: int, scale: float, draw: random.Random) -> list[Span]:
    spans, now = [], 0.0
    unit = 2.4e-3 * (hidden / 2048) ** 2 * scale
    for step in [*(("forward", k, 1) for k in range(layers)), *(("backward", k, 2) for k in reversed(range(layers)))]:
        way, layer, times = step
        path = f"blocks.{layer}"
        gathered = 12 * hidden * hidden * 2
        end = now + unit * draw.uniform(3.2, 4.8) * times
        spans.append(Span("transfer", "all_gather", path, now, end, gathered, 0, "train.py:41"))
        for part, kind, weight in PARTS:
            seconds = unit * weight * times * draw.uniform(0.9, 1.1) / 3
            flops = 2 * weight * hidden * hidden * 8192 * times
            line = f"model.py:{20 + 7 * weight}"
            spans.append(Span("compute", f"{kind.lower()} {way}", f"{path}.{part}", now, now + seconds, 0, flops, line))
            now += seconds
        if end > now:
            spans.append(Span("wait", "all_gather", path, now, end))
            now = end
        if way == "backward":
            spans.append(Span("transfer", "reduce_scatter", path, now, now + unit * 1.8, gathered, 0, "train.py:44"))
    spans.append(
        Span("compute", "AdamW.step", "", now, now + unit * 6, 0, 10 * layers * hidden * hidden, "train.py:46")
    )
    return spans


def _memory(seconds: float, layers: int, peak: int, draw: random.Random) -> Memory:
    times = [seconds * k / 2999 for k in range(3000)]
    series: dict[str, list[int]] = {name: [] for name in ("parameters", "gradients", "optimizer states", "activations")}
    series |= {"gathered": [], "transfers": [], "temporaries": [], "other": []}
    for k in range(3000):
        part = k / 2999
        forward, backward = min(part / 0.33, 1.0), min(max((part - 0.33) / 0.62, 0.0), 1.0)
        unit = int(part * layers * 3) % 2
        series["parameters"].append(int(0.11 * peak))
        series["optimizer states"].append(int(0.24 * peak))
        series["gradients"].append(int(0.11 * peak * backward))
        series["activations"].append(int(0.42 * peak * (forward - backward)))
        series["gathered"].append(int(0.05 * peak * (1 + unit)) if part < 0.95 else 0)
        series["transfers"].append(int(0.02 * peak * (1 + unit)) if part < 0.97 else 0)
        series["temporaries"].append(int(0.06 * peak * abs(math.sin(part * layers * 9))) + draw.randrange(1 << 20))
        series["other"].append(int(0.015 * peak))
    totals = [sum(values) for values in zip(*series.values(), strict=True)]
    top = max(range(3000), key=totals.__getitem__)
    alive = [
        Alive(
            "activations",
            f"blocks.{k}.{part}",
            f"model.py:{20 + 7 * weight}",
            series["activations"][top] * weight // 12 // layers,
            2,
        )
        for k in range(layers)
        for part, _, weight in PARTS
    ]
    alive += [Alive("parameters", "", "train.py:22", series["parameters"][top], layers * 8)]
    alive += [Alive("optimizer states", "", "train.py:46", series["optimizer states"][top], layers * 16)]
    alive += [Alive("gathered", f"blocks.{layers - 1}", "train.py:41", series["gathered"][top], 1)]
    alive.sort(key=lambda one: one.bytes, reverse=True)
    marks = [(0.33 * seconds, "backward begins"), (0.95 * seconds, "optimizer step")]
    return Memory(times, series, totals[top], times[top], alive, marks)


def _costs(spans: Sequence[Span], hidden: int) -> list[ModuleCost]:
    found: dict[str, list[Span]] = {}
    for span in spans:
        names = span.module.split(".") if span.lane != "wait" and span.module else []
        for length in range(2, len(names) + 1):
            found.setdefault(".".join(names[:length]), []).append(span)
    return [
        ModuleCost(
            path,
            ("Block", "MLP" if "mlp" in path else "Attention", "Linear")[path.count(".") - 1],
            sum(s.end - s.start for s in own if s.lane == "compute"),
            sum(s.flops for s in own),
            sum(s.bytes for s in own),
            16384 * hidden * 2,
        )
        for path, own in found.items()
    ]


def _links(world: int, sent: int) -> list[tuple[int, int, int]]:
    """Each rank sends to the others of its node of 8, and to those at the same place in other nodes."""
    links = []
    for source in range(world):
        node = range(source // 8 * 8, min(source // 8 * 8 + 8, world))
        links += [
            (source, target, sent // (6 if target == (source + 1) % 8 else 9)) for target in node if target != source
        ]
        links += [(source, target, sent // world) for target in range(source % 8, world, 8) if target not in node]
    return links


def _modules(layers: int, hidden: int, world: int) -> list[ModuleRow]:
    rows = [ModuleRow("", "Transformer", []), ModuleRow("blocks", "ModuleList", [])]
    rows.append(ModuleRow("embed", "Embedding", [_parameter("weight", (50304, hidden), world, 0)]))
    for layer in range(layers):
        rows.append(ModuleRow(f"blocks.{layer}", "Block", []))
        rows += [ModuleRow(f"blocks.{layer}.attn", "Attention", []), ModuleRow(f"blocks.{layer}.mlp", "MLP", [])]
        for part, kind, weight in PARTS:
            dim = 1 if part in ("attn.out", "mlp.down") else 0
            shape = (hidden, hidden * weight) if dim else (hidden * weight, hidden)
            parameters = [_parameter("weight", shape, world, dim), _parameter("bias", shape[:1], world, None)]
            rows.append(ModuleRow(f"blocks.{layer}.{part}", kind, parameters))
    return rows


def _parameter(name: str, shape: tuple[int, ...], world: int, dim: int | None) -> ParameterRow:
    def box(rank: int) -> BoxOnRank:
        if dim is None:
            return BoxOnRank(rank, (0,) * len(shape), shape)
        bounds = shape[dim] * rank // world, shape[dim] * (rank + 1) // world
        offsets = tuple(bounds[0] if k == dim else 0 for k in range(len(shape)))
        return BoxOnRank(rank, offsets, tuple(bounds[1] - bounds[0] if k == dim else n for k, n in enumerate(shape)))

    placed = f"on all {world:,} ranks" if dim is None else f"cut along dim {dim} over {world:,} ranks"
    return ParameterRow(name, shape, "bfloat16", 2 * math.prod(shape), [box(rank) for rank in range(world)], placed)
