"""What the name of a parameter says: the layer it belongs to, whether it is a bias, or a part of an adapter."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.plans.projections import Kind

WRAPPED = "base_layer"  # where peft keeps the layer that it adapts
ADAPTERS = {"lora_A": "in", "lora_B": "out", "lora_embedding_A": "in", "lora_embedding_B": "out"}


@dataclass(frozen=True)
class Named:
    """The parts of a parameter's name.

    >>> Named.of("layers.0.q_proj.bias")
    Named(parameter='layers.0.q_proj.bias', layer='layers.0.q_proj', is_bias=True, side='')
    >>> Named.of("layers.0.q_proj.lora_B.default.weight").side, Named.of("attn.in_proj_weight").layer
    ('out', 'attn.in_proj')
    """

    parameter: str  # as if no adapter were there
    layer: str
    is_bias: bool
    side: str  # of an adapter, which side of the layer it has: "in" or "out"

    @staticmethod
    def of(name: str) -> Named:
        """The parts of this name."""
        *path, last = (part for part in name.split(".") if part != WRAPPED)
        at = next((k for k, part in enumerate(path) if part in ADAPTERS), None)
        if at is not None:
            return Named(".".join((*path[:at], last)), ".".join(path[:at]), last == "bias", ADAPTERS[path[at]])
        parameter, is_bias = ".".join((*path, last)), last == "bias" or last.endswith("_bias")
        if last not in ("weight", "bias"):  # one that is no layer of its own, as those of nn.MultiheadAttention
            path.append(last.removesuffix("_weight").removesuffix("_bias"))
        return Named(parameter, ".".join(path), is_bias, "")

    def dim(self, kind: Kind, ndim: int, *, turned: bool) -> int | None:
        """The dim that is cut; None if the parameter stays whole. ``turned``: a weight is inputs by outputs."""
        if kind == "plain" or not ndim:
            return None
        if kind == "experts":
            return 0
        if self.side:
            return {("column", "out"): 0, ("row", "in"): ndim - 1}.get((kind, self.side))
        if self.is_bias:
            return ndim - 1 if kind == "column" else None
        return ndim - 1 if (kind == "row") != turned else max(ndim - 2, 0)
