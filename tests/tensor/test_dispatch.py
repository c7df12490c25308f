"""Who handles an op: the user, then the spec's class, then the library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import chunks, holds, places

import shardwise
from shardwise import ChunkShardingSpec, ShardedTensor, ones, zeros
from shardwise.tensor.dispatch import (
    basic_validation,
    custom_sharding_spec_op,
    dispatch_custom_op,
    has_custom_op,
    register_op,
    registry,
)
from shardwise.testing import ranks


class MySpec(ChunkShardingSpec):
    """A spec of a user's own."""


class MySpecialSpec(MySpec):
    """Derived from it."""


def forget(op: Any) -> None:
    """Undo what a test registered: the ranks are used again."""
    registry.overrides.pop(op, None)
    for table in registry.by_spec.values():
        table.pop(op, None)


@ranks(2)
def test_the_order_of_tables() -> None:
    """User override, then spec class with its bases, then built-in."""
    called: list[str] = []
    plain, special = ones(chunks(0, 0, 1), 4), ones(MySpecialSpec(0, places(0, 1)), 4)
    try:

        @custom_sharding_spec_op(MySpec, torch.clone)
        def for_spec(types: Any, args: Any, kwargs: Any, process_group: Any) -> str:
            called.append(f"spec {process_group.size()}")
            return "spec"

        assert torch.clone(special) == "spec"
        assert isinstance(torch.clone(plain), ShardedTensor)
        assert has_custom_op(special.sharding_spec(), torch.clone)
        assert not has_custom_op(plain.sharding_spec(), torch.clone)
        assert dispatch_custom_op(special.sharding_spec(), torch.clone, (), (special,), {}, dist.group.WORLD) == "spec"

        @register_op(torch.clone)
        def override(types: Any, args: Any, kwargs: Any, process_group: Any) -> str:
            return "override"

        assert torch.clone(special) == torch.clone(plain) == "override"
        assert called == ["spec 2", "spec 2"]
    finally:
        forget(torch.clone)
    with pytest.raises(RuntimeError, match="not registered for ChunkShardingSpec"):
        dispatch_custom_op(plain.sharding_spec(), torch.clone, (), (plain,), {}, None)


@ranks(2)
def test_an_op_that_the_library_does_not_know_can_be_added() -> None:
    """And gets the arguments as they were given."""
    tensor, plain = ones(chunks(0, 0, 1), 4, 3), torch.ones(3, 2)
    try:

        @register_op(torch.nn.functional.bilinear)
        def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
            return args, kwargs

        args, kwargs = torch.nn.functional.bilinear(plain, plain, tensor, bias=plain)
        assert args[2] is tensor
        assert kwargs["bias"] is plain
    finally:
        forget(torch.nn.functional.bilinear)


def test_a_handler_needs_four_parameters() -> None:
    """Found out when it is registered."""
    for decorator in (register_op(torch.add), custom_sharding_spec_op(ChunkShardingSpec, torch.add)):
        with pytest.raises(TypeError, match="expects signature"):
            decorator(lambda types, args: None)
    assert torch.add not in registry.overrides


@ranks(2)
def test_an_op_without_a_rule_is_refused_with_a_way_out() -> None:
    """The message names the op and its arguments without their data, and ends as callers expect."""
    tensor = ones(chunks(0, 0, 1), 4, 4)
    with (
        shardwise.gather_budget(0),
        pytest.raises(RuntimeError, match=r"torch function 'cholesky_inverse', with args: .*") as caught,
    ):
        torch.cholesky_inverse(tensor)
    message = str(caught.value)
    assert "gather_budget(64)" in message
    assert message.endswith("not supported for ShardedTensor!")
    assert "register_op" in message
    assert "ShardedTensor((4, 4), torch.float32, 2 shards on 2 ranks" in message
    assert "1.," not in message


@ranks(2)
def test_tensors_of_different_groups_do_not_mix() -> None:
    """In handlers that users register."""
    other = dist.new_group([0, 1])
    one, two = zeros(chunks(0, 0, 1), 4), zeros(chunks(0, 0, 1), 4, process_group=other)
    with pytest.raises(RuntimeError, match="All distributed tensors should use the same ProcessGroup"):
        basic_validation(torch.add, (one, [two]), {})
    basic_validation(torch.add, (one, [one]), {"other": torch.ones(1)})
    with pytest.raises(TypeError, match="without any distributed tensor"):
        basic_validation(torch.add, (torch.ones(1),), {})
    with pytest.raises(ValueError, match="No input for 'add'"):
        basic_validation(torch.add)


@ranks(2)
def test_an_op_that_was_called_below_python_is_computed_all_the_same() -> None:
    """As where torch function dispatch is disabled: aten ops find the sharded tensor there."""
    tensor = ones(chunks(0, 0, 1), 4)
    with torch._C.DisableTorchFunctionSubclass():
        more = torch.add(tensor, 1)
    assert holds(more, torch.full((4,), 2.0))
