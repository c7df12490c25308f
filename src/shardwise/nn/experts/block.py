"""The forward of a module that has a list of experts and calls them one by one.

Such a module decides by itself which tokens go to which expert, by masks or indices, so its choices are known from its
calls of experts: the rows that it gives to one are the tokens of that expert. Its forward runs twice on the plain
samples of this rank. In the first run each call is noted, and answered with zeros. Then all noted rows travel to their
experts at once, and the results back. In the second run each call is answered with its result. The gradients of rows go
through the first run, those of all else through the second.

That is right for a module that treats samples one by one and does not feed experts with results of others. `BlockCheck`
finds out whether it does when it is first called in some way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise import settings
from shardwise.autograd.anchors import tie
from shardwise.autograd.replicas import recorded
from shardwise.comm.agreement import in_op
from shardwise.comm.group import CallFingerprint
from shardwise.comm.transfer.wire import failing_together
from shardwise.errors import PropertyError
from shardwise.nn.experts.block_check import BlockCheck
from shardwise.nn.experts.block_samples import BlockSamples
from shardwise.nn.experts.dispatch import Dispatch
from shardwise.nn.experts.expert_calls import ExpertCall, ExpertCalls, RowsForm
from shardwise.nn.experts.layer import ExpertsForward, require_experts_usable, require_size_of_tokens
from shardwise.nn.experts.listed_experts import ListedExperts, put_for_now
from shardwise.nn.experts.route import expert_route
from shardwise.nn.own_shards import keep_own_shards
from shardwise.nn.sharding_plan.tree import ModuleSlot
from shardwise.ops.engine.chunking import replicated
from shardwise.ops.engine.plain_operand import shared_plain
from shardwise.tensor import ShardedTensor


class ListForward(ExpertsForward):
    """Stands in a list of experts for what is known of them; the module that has the list computes with it."""

    local: ListedExperts

    def __call__(self, *_: Any) -> Any:
        """A list of modules has no forward."""
        raise PropertyError("a list of experts cannot be called: call the module that has it")


class BlockForward:
    """The forward of one module that has a list of experts."""

    def __init__(self, module: nn.Module, experts: nn.ModuleList) -> None:
        self.module, self.experts = module, experts
        self.check = BlockCheck()
        self.calls = ExpertCalls()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives. Every rank of the group calls it."""
        return experts(self, args, kwargs)

    @property
    def list_forward(self) -> ListForward:
        """That of its list."""
        found = vars(self.experts)["forward"]
        assert isinstance(found, ListForward)
        return found

    def run(
        self, samples: BlockSamples, answers: Sequence[torch.Tensor] | None = None, *, echoes: bool = False
    ) -> tuple[Any, list[ExpertCall]]:
        """The module's own forward on samples of this rank; its result, and its calls of experts.

        They are answered with these results; without any, with zeros, or with what they were given.
        """
        with self.calls.answered(answers, echoes=echoes) as calls:
            args, kwargs = samples.local()
            return type(self.module).forward(self.module, *args, **kwargs), calls


def experts(block: BlockForward, args: Any, kwargs: Any) -> Any:
    """The forward of a module with a list of experts; by this name traces and errors call it."""
    forward = block.list_forward
    model = forward.local.model
    group = model._process_group
    require_experts_usable(group)
    samples = BlockSamples.of(block.module, model, args, kwargs)
    with _plain_rest(block, model, samples.are_own) as rest:
        key = samples.key
        known = block.check.known.get(key)

        def work() -> tuple[tuple[Any, list[ExpertCall]], CallFingerprint]:
            made, calls = block.run(samples)
            if known is not None:
                for call in calls:
                    call.require(known.form)
            return (made, calls), CallFingerprint({"verb": "experts", "of": "a list", "known": known is not None})

        output, calls = in_op(group, work)
        if known is None:
            known = block.check.learn(key, group, samples, output, calls, block.module, block.run)
        with failing_together(group):
            back = None
            if known.form is not None:
                given = [*samples.leaves, *block.module.parameters()]
                records = torch.is_grad_enabled() and any(getattr(one, "requires_grad", False) for one in given)
                sources = [one for one in (*samples.tensors(), *rest) if one.requires_grad]
                anchor = tie(sources) if records and sources else None
                results, back = _answers(block, known.form, calls, anchor, records=records)
                output = block.run(samples, results)[0]
            return samples.wrapped(output, known.results, back)


def _answers(
    block: BlockForward, form: RowsForm, calls: Sequence[ExpertCall], anchor: torch.Tensor | None, *, records: bool
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """The result of each call, and an anchor; the rows travel to the experts and back."""
    forward = block.list_forward
    local = forward.local
    group, device = local.model._process_group, local.model._frame.device
    sizes = [call.rows for call in calls]
    rows = form.joined(calls, device)
    numbers = torch.tensor([call.expert for call in calls], dtype=torch.int64).repeat_interleave(
        torch.tensor(sizes, dtype=torch.int64)
    )
    numbers = numbers.to(device, non_blocking=True)
    forward.count(numbers, len(block.experts))
    route = expert_route(group, local.holders, device)
    dispatch = Dispatch(route, numbers[:, None], group, lambda: [len(numbers)] * group.size(), by_expert=True)
    received = dispatch.send(rows, None, anchor, records=records)
    here = route.experts[route.here]
    counts = torch.bincount(received.expert.view(-1), minlength=len(here)).tolist()
    made, anchors = local.run(here, form.separate(received.rows), counts)
    if made is None:
        made = torch.zeros_like(received.rows[0])
    else:
        require_size_of_tokens(made, form.separate(received.rows)[0])
        made = made.reshape(received.rows[0].shape).to(received.rows[0].dtype)
    results, back = dispatch.give_back(made, received, anchors, records=records)
    separate = form.separate([results])[0]
    return list(separate.split_with_sizes(sizes)) if sizes else [], back


@contextmanager
def _plain_rest(block: BlockForward, model: ShardedTensor, are_own: bool) -> Iterator[list[torch.Tensor]]:
    """The module with plain tensors in place of all parameters that are not the experts': these tensors.

    What ranks bring for their gradients is added up, unless samples are each rank's own by the old system's rule.
    Every rank calls it.
    """
    group, left_out = model._process_group, set(block.experts.modules())
    found: list[tuple[ModuleSlot, torch.Tensor]] = []
    for module in block.module.modules():
        if module in left_out:
            continue
        held: dict[str, Any] = dict(module._parameters)
        for name, parameter in held.items():
            value = parameter
            if isinstance(parameter, ShardedTensor):
                value = recorded(replicated(parameter))[0][0]
            elif parameter is not None and not are_own:
                value = shared_plain(parameter, group)
            if value is not parameter:
                found.append((ModuleSlot(module, name), value))
    with put_for_now(found), settings.changed(compares_first=False):
        yield [value for _, value in found]


class ListedForward:
    """Stands in an expert of a list for its forward: each call is noted and answered by the module with the list."""

    def __init__(self, block: BlockForward, number: int) -> None:
        self.block, self.number = block, number

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The result of the rows, or zeros in their place."""
        return self.block.calls.answer(self.number, args, kwargs)


def distribute_list(module: nn.Module, experts: nn.ModuleList) -> None:
    """Let a module send tokens to the experts of its list, each of which lies whole on ranks."""
    block = BlockForward(module, experts)
    module.forward = block
    experts.forward = ListForward(ListedExperts(experts))
    for number, expert in enumerate(experts):
        expert.forward = ListedForward(block, number)
        for one in expert.modules():
            keep_own_shards(one)
