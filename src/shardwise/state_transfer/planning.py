"""A state's transfer as one rank knows it: both sides, the routes between them, and this rank's own load."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce

import numpy as np
import torch

from shardwise.checkpoint.name_patterns import Rename
from shardwise.comm.group import Fields
from shardwise.comm.transfer.segments import Limits, Load, Piece
from shardwise.comm.transfer.views import view_of
from shardwise.errors import PropertyError, StateMismatchError
from shardwise.layout.geometry import Boxes, IntArray
from shardwise.state_transfer.expression import Expression, Take
from shardwise.state_transfer.meetings import TransferMeeting
from shardwise.state_transfer.recipe import Recipe, resolve
from shardwise.state_transfer.routes import Plans, StateRoute, routes_of
from shardwise.state_transfer.sides import Given, State, Tensor, given, joined, side_digest, words_of

NOTHING = Load.of((), (), 0, 1, Limits(0, 0, 1, 1))
OnArrival = Callable[[str, list[torch.Tensor]], object]  # the name of a target, and its local boxes


@dataclass(frozen=True)
class Options:
    """How a transfer is to be."""

    rename: Rename
    recipe: Recipe
    max_bytes: int
    strict: bool
    staged: bool
    on_arrival: OnArrival | None

    @property
    def fields(self) -> Fields:
        """What all ranks must say alike."""
        if type(self.max_bytes) is not int or self.max_bytes < 1:
            raise PropertyError(f"max_bytes should be a number of bytes, at least 1, not {self.max_bytes!r:.50}")
        return {
            "verb": "StateTransfer",
            "max_bytes": self.max_bytes,
            "strict": self.strict,
            "staged": self.staged,
        }


@dataclass(frozen=True, eq=False)
class Planned:
    """All that one rank knows: the same on every rank, but for what is given here and the load."""

    given: tuple[Mapping[str, Given], Mapping[str, Given]]  # source and target, as they are here
    sources: Mapping[str, Tensor]
    targets: Mapping[str, Tensor]
    routes: Sequence[StateRoute]
    made_of: Mapping[str, frozenset[str]]  # the sources of each target that is filled, but for second names
    gaps: Mapping[str, Boxes]  # of targets that have more than their sources: what is filled with zeros
    device_types: frozenset[str]  # on all ranks
    crowded: bool = False  # whether a host has fewer cores than ranks
    most_peers: int = 0  # to and from how many others a rank sends and receives at most
    load: Load = NOTHING
    hands_over: bool = False  # whether any rank hands over what arrives

    def local_sources(self, name: str, here: int) -> dict[int, torch.Tensor]:
        """What is here of a source, by the rows of its layout."""
        rows = self.sources[name].layout.rows_on(here)
        return dict(zip(rows, self.given[0][name].tensors.values(), strict=True)) if rows else {}

    def local_targets(self, name: str, here: int) -> dict[int, torch.Tensor] | None:
        """The same of a target; None where this rank wants it and gives no memory."""
        rows = self.targets[name].layout.rows_on(here)
        if not rows:
            return {}
        if not self._has(1, name):
            return None
        tensors = [tensor.detach() for tensor in self.given[1][name].tensors.values()]
        return dict(zip(rows, tensors, strict=True))

    def has_source(self, name: str) -> bool:
        """Whether this rank gives a tensor, and not its layout alone."""
        return self._has(0, name)

    def _has(self, side: int, name: str) -> bool:
        return name in self.given[side] and bool(self.given[side][name].tensors)

    def dtype_of(self, target: str) -> torch.dtype:
        """Of a target that nobody has memory for: one that can hold all its sources."""
        known = self.targets[target].dtype
        dtypes = [tensor.dtype for tensor in map(self.sources.__getitem__, self.made_of[target]) if tensor.dtype]
        return known or _common(dtypes)

    def source_view(self, here: int) -> Callable[[Piece], torch.Tensor]:
        """A function that gives the place of a piece of this rank's sources."""
        views: dict[tuple[int, int], torch.Tensor] = {}

        def view(piece: Piece) -> torch.Tensor:
            found = views.get((piece.plan, piece.row))
            if found is None:
                route = self.routes[piece.plan]
                local, layout = self.local_sources(route.source, here), self.sources[route.source].layout
                found = route.windows[0].view(local[piece.row].detach(), layout.at([piece.row]).offsets[0].tolist())
                views[piece.plan, piece.row] = found
            return view_of(found, piece.offsets, piece.sizes)

        return view

    @property
    def device_types_here(self) -> set[str]:
        """On this rank."""
        return _device_types(self.given)

    @cached_property
    def digest(self) -> str:
        """By which ranks tell that they are about to do the same transfer."""
        return side_digest(
            repr([(route.source, route.target, route.patch, route.dtype) for route in self.routes]).encode()
        )


def planned(
    meeting: TransferMeeting, source: State, target: State, options: Options, require: Callable[[Planned], None]
) -> Planned:
    """Tell the others what is here, and work out what goes where, which must be as required on every rank.

    Every rank of the meeting calls it.
    """

    def give() -> tuple[tuple[dict[str, Given], dict[str, Given], bytes], Fields, bytes]:
        mine = given(source, meeting.ranks), given(target, meeting.ranks)
        words = words_of(*mine)
        brought = [side_digest(words), socket.gethostname(), sorted(_device_types(mine)), meeting.shift, cores()]
        return (*mine, words), options.fields, _encoded(brought)

    (ours, theirs, words), told = meeting.in_step(give)
    known = [json.loads(each) for each in told]
    alike: dict[tuple[str, int], list[int]] = {}
    for rank, (digest, _, _, shift, _) in zip(meeting.everyone, known, strict=True):
        alike.setdefault((digest, shift), []).append(rank)
    speaks = any(ranks[0] == meeting.here for ranks in alike.values())
    _, spoken = meeting.in_step(lambda: (None, {}, words if speaks else b""))
    said = dict(zip(meeting.everyone, spoken, strict=True))
    names = [host for _, host, *_ in known]
    hosts, ranks_on = _hosts(meeting, names), Counter(names)
    device_types = frozenset(each for _, _, some, *_ in known for each in some) | {"cpu"}
    crowded = any(ranks_on[host] > there for _, host, _, _, there in known)

    def plan() -> tuple[Planned, Fields, bytes]:
        problems: list[str] = []
        parsed = [(ranks, shift, json.loads(said[ranks[0]])) for (_, shift), ranks in alike.items()]
        sides = [
            joined(which, [(ranks, shift, words[k]) for ranks, shift, words in parsed], meeting.size, problems)
            for k, which in enumerate(("source", "target"))
        ]
        if problems:
            raise StateMismatchError("the ranks do not give the same states:\n  " + "\n  ".join(problems))
        found = _planned((ours, theirs), sides[0], sides[1], options, hosts, device_types)
        require(found)
        hands_over = any(found.local_targets(name, meeting.here) is None for name in found.made_of)
        rename = "a function" if callable(options.rename) else options.rename
        fields: Fields = {"recipe": dict(options.recipe), "rename": rename, "transfer": found.digest}
        return found, {"verb": "StateTransfer", **fields}, _encoded([_peers(found.routes, meeting.here), hands_over])

    draft, answers = meeting.in_step(plan)
    counts, handing_over = zip(*map(json.loads, answers), strict=True)
    return replace(draft, most_peers=max(counts), hands_over=any(handing_over), crowded=crowded)


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _device_types(sides: Sequence[Mapping[str, Given]]) -> set[str]:
    """The types of devices on which this rank has what it gives."""
    return {tensor.device.type for side in sides for one in side.values() for tensor in one.tensors.values()}


def _encoded(values: object) -> bytes:
    return json.dumps(values).encode()


def _hosts(meeting: TransferMeeting, names: Sequence[str]) -> IntArray | None:
    """The host of each rank by number; None where all are on one."""
    known = {name: number for number, name in enumerate(dict.fromkeys(names))}
    if len(known) == 1:
        return None
    hosts = np.zeros(meeting.size, dtype=np.int64)
    hosts[list(meeting.everyone)] = [known[name] for name in names]
    return hosts


def _planned(
    given_here: tuple[dict[str, Given], dict[str, Given]],
    sources: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    options: Options,
    hosts: IntArray | None,
    device_types: frozenset[str],
) -> Planned:
    sizes = {name: tensor.size for name, tensor in sources.items()}
    wanted = {name: tensor.size for name, tensor in targets.items()}
    expressions = resolve(options.recipe, options.rename, sizes, wanted, strict=options.strict)
    _require_castable(expressions, sources, targets)
    routes: list[StateRoute] = []
    plans: Plans = {}
    made_of: dict[str, frozenset[str]] = {}
    gaps: dict[str, Boxes] = {}
    done: dict[tuple[str, Expression], str] = {}
    for name, expression in expressions.items():
        into = targets[name]
        if done.setdefault((into.tied, expression.replaced(partial(_untied, sources))), name) != name:
            continue  # the same memory, filled with the same
        made_of[name] = expression.sources
        patches = expression.patches(sizes)
        routes += routes_of(name, patches, sources, into, hosts, plans)
        gap = expression.gaps(sizes)
        if gap:
            gaps[name] = Boxes.parse([box[0] for box in gap], [box[1] for box in gap], len(into.size))
    return Planned(given_here, sources, targets, routes, made_of, gaps, device_types)


def _untied(sources: Mapping[str, Tensor], expression: Expression) -> Expression:
    """A source under the first of its names."""
    return Take(sources[expression.name].tied) if isinstance(expression, Take) else expression


def _require_castable(
    expressions: Mapping[str, Expression], sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]
) -> None:
    """Raise where values would lose a part of themselves, rather than digits; or there is no dtype for all of them."""
    problems = []
    for name, expression in expressions.items():
        into = targets[name].dtype
        dtypes = {source: dtype for source in sorted(expression.sources) if (dtype := sources[source].dtype)}
        lost = [source for source, dtype in dtypes.items() if dtype.is_complex]
        if lost and into is not None and not into.is_complex:
            problems.append(
                f"'{name}' of the target is {into}, and '{lost[0]}' of the source complex: values would lose their "
                "imaginary part"
            )
        if into is None:
            try:
                _common(list(dtypes.values()))
            except RuntimeError:
                parts = ", ".join(f"'{source}' is {dtype}" for source, dtype in dtypes.items())
                problems.append(
                    f"no dtype holds all that makes '{name}' of the target, for which nobody has one: {parts}"
                )
    if problems:
        raise StateMismatchError("the dtypes of the two sides do not go together:\n  " + "\n  ".join(problems))


def _common(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    return reduce(torch.promote_types, dtypes)


def _peers(routes: Sequence[StateRoute], here: int) -> int:
    """To and from how many others this rank sends and receives."""
    out = {rank for route in routes for rank in route.plan.sends(here).ranks} - {here}
    into = {rank for route in routes for rank in route.plan.receives(here).ranks} - {here}
    return len(out) + len(into)


def loaded(draft: Planned, here: int, world: int, max_bytes: int, device: torch.device) -> Planned:
    """What one rank of so many sends and receives, through buffers on a device that take so much memory at most."""
    limits = Limits.of(max_bytes, draft.most_peers, world, device, crowded=draft.crowded)
    plans, dtypes = [route.plan for route in draft.routes], [route.dtype for route in draft.routes]
    return replace(draft, load=Load.of(plans, dtypes, here, world, limits))
