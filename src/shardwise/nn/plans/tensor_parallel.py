"""`tensor_parallel`: pairs of layers, the first cut along its outputs and the second along its inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import PlanError
from shardwise.layout.specs import ShardingSpec
from shardwise.layout.specs.chunking import weighted_sizes
from shardwise.nn.plans.layers import Heads, ParameterName, Role, heads_around, is_turned, role_of, vocabularies
from shardwise.nn.plans.rank_rows import DimPart, RankRows
from shardwise.nn.plans.reasons import PLAIN, Reason, ReasonedPlan
from shardwise.nn.plans.transformers_plan import TransformersPlan
from shardwise.nn.sharding_plan import ModuleTree
from shardwise.nn.sharding_plan.steps import each_parameter


def tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    weights: Sequence[float] | None = None,
    process_group: ProcessGroup | None = None,
) -> ReasonedPlan:
    """The plan that cuts the layers of a model in pairs: the first of each along its outputs, the second along its
    inputs, so that what lies between them stays in pieces.

    A model of transformers carries a plan, which is followed. Layers that it does not name, and those of other models,
    are known by their usual names, such as q_proj, fc1 or lm_head; all others stay plain. ``print(plan)`` says for
    every parameter what was chosen and why. Biases are cut with the outputs of their layer. Of layers that are packed
    into one weight, each is shared out by itself.

    Parameters are shared out over all ranks of the group, or along a mesh of one axis. If that is an axis of a larger
    mesh, there are replicas along the others: with ``mesh["tp"]`` of a mesh of data parallel by tensor parallel ranks
    the plan says both. Only lines within the process group count: give the group to `shard_module`, too. ``weights``
    has a number for each rank, and parts are in proportion, in whole heads.

    Every rank makes the same plan; nothing is sent. A plan that would cut through a head of attention is a `PlanError`,
    with how many ranks could share the heads; so is one that would cut nothing::

        >>> import torch.distributed as dist
        >>> dist.init_process_group("fake", rank=0, world_size=2)
        >>> print(tensor_parallel(nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16)))
        parameter                  size  cut                            why
        self_attn.in_proj_weight   24×8  3 parts of dim 0 over 2 ranks  queries, keys and values in one, 2 heads
        self_attn.in_proj_bias     24    3 parts of dim 0 over 2 ranks  queries, keys and values in one, 2 heads
        self_attn.out_proj.weight  8×8   dim 1 over 2 ranks             output of attention, 2 heads
        self_attn.out_proj.bias    8     plain                          output of attention, added to the sum
        linear1.weight             16×8  dim 0 over 2 ranks             first of a pair of layers
        linear1.bias               16    dim 0 over 2 ranks             first of a pair of layers
        linear2.weight             8×16  dim 1 over 2 ranks             second of a pair of layers
        linear2.bias               8     plain                          second of a pair of layers, added to the sum
        norm1.weight               8     plain                          a norm
        norm1.bias                 8     plain                          a norm
        norm2.weight               8     plain                          a norm
        norm2.bias                 8     plain                          a norm
        6 of 12 parameters are cut
        >>> dist.destroy_process_group()
    """
    rank_rows = RankRows.of(mesh, weights, process_group)
    chooser = _Chooser(model, rank_rows)
    tree = chooser.tree
    specs: dict[str, ShardingSpec] = {}
    reasons = []
    for name, parameter in each_parameter(tree):
        names = dict.fromkeys(tree.names_of_parameter(name))  # of a tied parameter, several
        choices = {each: chooser.choice(each, parameter) for each in names}
        known = next((each for each in choices if choices[each].parts), name)
        chosen = choices[known]
        why = chosen.why if known == name else f"{chosen.why}: tied to {known}"
        cut = PLAIN
        if chosen.parts:
            specs[name], cut = rank_rows.spec(parameter, chosen.dim, chosen.parts)
        reasons.append(Reason(name, tuple(parameter.shape), cut, why))
    chooser.require_whole_heads()
    plan = ReasonedPlan(specs, reasons=tuple(reasons))
    if reasons and not specs:
        raise PlanError(
            f"tensor_parallel would cut nothing of {type(model).__name__}: it knows none of the layers, or may not cut "
            'them. Name them yourself, as in {"**.up.weight": 0, "**.down.weight": 1}, or cut every parameter by '
            f"plans.fully_sharded(model).\n{plan}"
        )
    return plan


@dataclass(frozen=True)
class Choice:
    """A dim that is cut by parts; without parts the parameter stays plain."""

    why: str
    dim: int = 0
    parts: tuple[DimPart, ...] = ()


class _Chooser:
    def __init__(self, model: nn.Module, rank_rows: RankRows) -> None:
        self.tree = ModuleTree(model)
        self._rank_rows = rank_rows
        self._model_plan = TransformersPlan(self.tree.modules)
        self._words = vocabularies(self.tree.modules)
        self._split: dict[Heads, list[str]] = {}  # heads that cannot be shared out evenly, and where

    def choice(self, name: str, parameter: torch.Tensor) -> Choice:
        """The choice for the parameter of this name."""
        named, modules = ParameterName.of(name), self.tree.modules
        role = role_of(named.layer, modules, self._words)
        word = self._model_plan.word(named.parameter, named.layer)
        if word is not None:
            kind, packed = self._model_plan.meaning(word, name)
            known = role if role is not None and role.kind == kind else Role(kind, "")
            role = Role(kind, f"the model's plan: {word}", known.heads, known.packed or packed)
        if role is None:
            return Choice(_why_plain(modules[name.rpartition(".")[0]]))
        dim = named.dim(role.kind, parameter.ndim, turned=is_turned(named.layer, modules))
        if dim is None:
            also = ", added to the sum" if named.is_bias and role.kind == "row" else ""
            return Choice(role.what + also)
        return self._cut(name, role, dim, parameter.shape[dim], heads_around(named.layer, modules))

    def _cut(self, name: str, role: Role, dim: int, size: int, heads: Heads | None) -> Choice:
        """The dim in parts, each in units that stay whole."""
        if not role.heads or heads is None:
            return Choice(role.what, dim, _alike(size, LAYERS[role.packed]))
        why = f"{role.what}, {heads}"
        if heads.groups == 1 or (heads.keys == 1 and (role.heads == "keys" or role.packed)):
            return Choice(f"{why}: one head cannot be shared out")
        parts = _by_heads(size, role, heads)
        if not parts:  # the heads are others than these
            return Choice(role.what, dim, _alike(size, LAYERS[role.packed]))
        if self._rank_rows.weights is None and any(part.units % len(self._rank_rows) for part in parts):
            self._split.setdefault(heads, []).append(name)
        return Choice(why, dim, parts)

    def require_whole_heads(self) -> None:
        """Raise if a head would be cut through."""
        for heads, names in self._split.items():
            ranks = len(self._rank_rows)
            share = math.gcd(heads.groups, ranks)
            ways = []
            if share > 1:
                ways.append(
                    f"{share} ranks can: mesh = init_device_mesh({self._rank_rows.device_type or 'cpu'!r}, "
                    f"({self._rank_rows.ranks.size // share}, {share}), mesh_dim_names=('dp', 'tp')), and "
                    "tensor_parallel(model, mesh['tp'])"
                )
            if heads.groups > ranks:
                uneven = weighted_sizes(heads.groups, [1] * ranks)
                ways.append(f"unequal shares of whole heads can be asked for: tensor_parallel(model, weights={uneven})")
            ways.append("plans.fully_sharded(model) cuts anything")
            others = f" and {len(names) - 1} other parameters" if len(names) > 1 else ""
            raise PlanError(
                f"{ranks} ranks cannot share {heads} evenly, so {names[0]!r}{others} would be cut through a head. "
                + "; ".join(ways)
            )


LAYERS = {"": 1, "qkv": 3, "kv": 2, "halves": 2}  # in one weight


def _alike(size: int, layers: int) -> tuple[DimPart, ...]:
    """A dim of so many layers of the same size; as one if it cannot be."""
    layers = layers if size % layers == 0 else 1
    return (DimPart(size // layers, size // layers),) * layers


def _by_heads(size: int, role: Role, heads: Heads) -> tuple[DimPart, ...]:
    """A dim in parts of whole heads; none if it is not a multiple of them."""
    units = heads.groups if role.heads == "queries" else heads.keys
    own = {"": (units,), "qkv": (heads.queries, heads.keys, heads.keys), "kv": (heads.keys, heads.keys)}[role.packed]
    if size % sum(own):
        return ()
    return tuple(DimPart(size // sum(own) * count, units) for count in own)


def _why_plain(owner: nn.Module) -> str:
    return "a norm" if "norm" in type(owner).__name__.lower() else "none of the names that are known"
