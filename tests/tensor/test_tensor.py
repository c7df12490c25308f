"""What a sharded tensor says of itself, autograd on its shards, copies and repr."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, KINDS, PLAIN, SIZE, SPECS, boxes, chunks, holds, places, whole
from torch import nn

import shardwise
from shardwise import ChunkShardingSpec, ShardedTensor
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

PROPERTIES = ["shape", "dtype", "ndim", "layout", "device", "is_cuda", "is_meta", "is_sparse", "itemsize", "nbytes"]
PROPERTIES += ["requires_grad", "is_leaf", "grad", "grad_fn"]
METHODS = ["size", "dim", "numel", "nelement", "ndimension", "stride", "element_size", "is_floating_point"]
METHODS += ["is_complex", "is_contiguous", "is_pinned"]
UNEVEN = SPECS["uneven, several per rank"]  # rank 1 holds nothing


@ranks(4)
def test_it_describes_the_whole_tensor() -> None:
    """Size, dtype and the like are those of the plain tensor, on every rank."""
    tensor, plain = shardwise.ones(UNEVEN, *SIZE, dtype=torch.float64), torch.ones(SIZE, dtype=torch.float64)
    for name in PROPERTIES:
        assert getattr(tensor, name) == getattr(plain, name), name
    for name in METHODS:
        assert getattr(tensor, name)() == getattr(plain, name)(), name
        assert getattr(torch.Tensor, name)(tensor) == getattr(plain, name)(), name
    assert (tensor.size(0), tensor.size(-1), tensor.size(dim=1), len(tensor)) == (7, 6, 6, 7)
    assert torch.is_floating_point(tensor)
    assert torch.numel(tensor) == 42
    assert tensor.contiguous() is tensor
    assert not tensor.is_pinned()
    for dim in (2, 7, -3):
        with pytest.raises(IndexError, match=rf"Dimension out of range \(expected .* of \[-2, 1\], .* {dim}"):
            tensor.size(dim)
    assert isinstance(tensor, torch.Tensor)


class Mine(ChunkShardingSpec):
    """A spec of a user's own, which shards by its own function."""

    def shard(self, tensor: torch.Tensor, src_rank: int = 0, process_group: Any = None) -> Any:
        """One more than the tensor."""
        return super().shard(tensor + 1, src_rank, process_group)


@ranks(4)
def test_a_spec_of_a_users_own_shards_by_its_own_function() -> None:
    """Asked by shard_tensor and shard_parameter, if the ranks agree whom to ask."""
    spec, plain = Mine(1, places(0, 1, 3)), PLAIN.clone()
    tensor = shardwise.tensor.shard_tensor(plain, spec, src_rank=2)
    assert tensor.sharding_spec() is spec
    assert holds(tensor, PLAIN + 1)
    layer = nn.Linear(6, 7)
    weight = layer.weight.detach().clone()
    shardwise.nn.shard_parameter(layer, "weight", spec)
    dist.broadcast(weight, 0)
    assert holds(layer.weight, weight + 1)
    for rank_spec, source in ((spec if dist.get_rank() else chunks(1, 0, 1, 3), 0), (spec, dist.get_rank() // 3)):
        with pytest.raises(ValueError, match="does not match from different ranks"):
            shardwise.tensor.shard_tensor(plain, rank_spec, source)


@ranks(4)
def test_a_spec_can_be_assigned() -> None:
    """It names the rule; the boxes stay where they are, also in a pickle."""
    tensor = shardwise.tensor.shard_tensor(PLAIN, chunks(0, 0, 1, 2, 3))
    for spec in (boxes(([0, 0], [7, 6], 2)), UNEVEN):
        tensor._sharding_spec = spec
        assert tensor.sharding_spec() is spec
        assert tensor._sharding_spec is spec
        assert holds(tensor + 0, PLAIN)
        again = pickle.loads(pickle.dumps(tensor))
        assert holds(again, PLAIN)
        assert again.metadata() == tensor.metadata()
    with pytest.raises(ValueError, match="Expecting ShardingSpec but got"):
        tensor._sharding_spec = "rows"


@ranks(4)
def test_local_tensor_wants_exactly_one_shard() -> None:
    """Where there are none or several, the error says how many."""
    tensor = shardwise.ones(UNEVEN, *SIZE)
    count = [3, 0, 1, 1][dist.get_rank()]
    assert len(tensor.local_shards()) == count
    if count == 1:
        assert tensor.local_tensor() is tensor.local_shards()[0].tensor
    else:
        with pytest.raises(
            NotImplementedError, match=f"Only single local shard is supported. Number of shards: {count}"
        ):
            tensor.local_tensor()


@ranks(4)
def test_repr_is_one_line_without_data() -> None:
    """On ranks with one, several and no shards."""
    tensor = shardwise.ones(UNEVEN, *SIZE, requires_grad=True)
    here = ["[0:3, 0:2], [3:4, 0:6], [4:7, 1:6]", "none", "[0:3, 2:6]", "[4:7, 0:1]"][dist.get_rank()]
    text = f"ShardedTensor((7, 6), torch.float32, 5 shards on 3 ranks, here {here} on cpu, requires_grad=True)"
    assert repr(tensor) == str(tensor) == f"{tensor}" == text
    many = shardwise.ones(chunks(0, *[0] * 100), 100)
    if dist.get_rank() == 0:
        assert repr(many).endswith("here [0:1], [1:2], [2:3] and 97 more on cpu)")


@ranks(2)
def test_hash_is_by_identity() -> None:
    """So tensors can be keys, as other libraries use them."""
    one, two = shardwise.ones(chunks(0, 0, 1), 4), shardwise.ones(chunks(0, 0, 1), 4)
    table = {one: 1, two: 2}
    assert (table[one], table[two]) == (1, 2)


@pytest.mark.parametrize("name", SPECS)
@ranks(4)
def test_clone_and_detach(name: str) -> None:
    """Clone copies and keeps the graph; detach shares memory and drops it; both share the layout."""
    tensor = shardwise.rand(SPECS[name], *SIZE, requires_grad=True)
    for cloned in (tensor.clone(), torch.clone(tensor), tensor.clone(memory_format=torch.contiguous_format)):
        assert torch.equal(whole(cloned), whole(tensor))
        assert cloned.requires_grad
        assert not cloned.is_leaf
        assert cloned._layout is tensor._layout
        assert cloned.sharding_spec() is tensor.sharding_spec()
    for detached in (tensor.detach(), torch.detach(tensor), tensor.data):
        assert not detached.requires_grad
        pairs = zip(detached.local_shards(), tensor.local_shards(), strict=True)
        assert all(a.tensor.data_ptr() == b.tensor.data_ptr() for a, b in pairs)
    with torch.no_grad():
        assert not tensor.clone().requires_grad


@pytest.mark.parametrize("name", SPECS)
@ranks(4)
def test_gradients_are_sharded_as_the_tensor_is(name: str) -> None:
    """The graph is in the shards, so backward through them fills `.grad`."""
    tensor = shardwise.rand(SPECS[name], *SIZE, requires_grad=True)
    assert tensor.grad is None
    assert tensor.is_leaf
    for shard in tensor.clone().local_shards():
        (shard.tensor.sum() * 3).backward()
    if tensor.local_shards():
        assert tensor.grad is not None
        assert tensor.grad.metadata().shards_metadata == tensor.metadata().shards_metadata
        assert all(bool((shard.tensor == 3).all()) for shard in tensor.grad.local_shards())
    tensor.grad = torch.zeros_like(tensor)
    assert tensor.grad is not None
    assert torch.equal(whole(tensor.grad), torch.zeros(SIZE))
    del tensor.grad
    assert tensor.grad is None


@ranks(2)
def test_a_shard_that_nothing_depends_on_has_a_zero_gradient() -> None:
    """When another shard of the same rank has one."""
    tensor = shardwise.ones(chunks(0, 0, 0, 1, 1), 4, requires_grad=True)
    tensor.local_shards()[0].tensor.sum().backward()
    assert tensor.grad is not None
    assert whole(tensor.grad).tolist() == [1, 0, 1, 0]
    tensor.grad.local_shards()[1].tensor.add_(5)
    assert whole(tensor.grad).tolist() == [1, 5, 1, 5]


@ranks(2)
def test_a_gradient_must_be_sharded_alike() -> None:
    """Anything else is refused."""
    tensor = shardwise.ones(chunks(0, 0, 1), 4, 4, requires_grad=True)
    for wrong in (torch.ones(4, 4), shardwise.ones(chunks(1, 0, 1), 4, 4)):
        with pytest.raises(ValueError, match="expected a tensor that is sharded as"):
            tensor.grad = wrong


@ranks(4)
def test_requires_grad_can_be_switched() -> None:
    """On the shards, the tensor and its metadata, also where there are no shards."""
    tensor = shardwise.ones(UNEVEN, *SIZE)
    tensor.metadata()
    assert tensor.requires_grad_() is tensor
    assert tensor.requires_grad
    assert tensor.metadata().tensor_properties.requires_grad
    assert all(shard.tensor.requires_grad for shard in tensor.local_shards())
    tensor.requires_grad = False
    assert not tensor.requires_grad
    assert not tensor.metadata().tensor_properties.requires_grad
    torch.Tensor.requires_grad_(tensor, True)
    assert tensor.requires_grad
    assert not tensor.detach_().requires_grad


@pytest.mark.parametrize("name", SPECS)
@ranks(4)
def test_copies_keep_everything_but_the_memory(name: str) -> None:
    """deepcopy copies the shards, copy shares them; both keep what was hung on the tensor."""
    tensor = shardwise.rand(SPECS[name], *SIZE, requires_grad=True)
    tensor.metadata()
    tensor.note = ["hung on it"]
    deep, shallow = copy.deepcopy({"a": tensor, "b": tensor}), copy.copy(tensor)
    assert deep["a"] is deep["b"]
    twin: Any = deep["a"]
    assert twin.requires_grad
    assert twin.metadata() == tensor.metadata()
    assert twin.note == tensor.note
    assert twin.note is not tensor.note
    assert shallow.note is tensor.note
    before = whole(tensor)
    with torch.no_grad():
        for shard in tensor.local_shards():
            shard.tensor.zero_()
    assert torch.equal(whole(twin), before)
    assert torch.equal(whole(shallow), torch.zeros(SIZE))


@pytest.mark.parametrize("name", KINDS)
@ranks(4)
def test_a_deep_copy_has_a_gradient_where_that_of_a_plain_one_has(name: str) -> None:
    """A leaf's has its own; a parameter's has none, also on a rank without shards."""
    for kind in (torch.nn.Parameter, torch.Tensor.requires_grad_):
        leaves = [kind(shard_tensor(PLAIN, ALL[name])), kind(PLAIN.clone())]
        for leaf in leaves:
            (leaf * leaf).sum().backward()
        sharded, plain = (copy.deepcopy(leaf) for leaf in leaves)
        assert sharded.requires_grad
        assert sharded.is_leaf
        assert (sharded.grad is None) == (plain.grad is None)
        if plain.grad is not None:
            assert holds(sharded.grad, plain.grad)
            assert sharded.grad is not leaves[0].grad
        assert leaves[0].grad is not None


@ranks(2)
def test_copies_are_paired_by_box_not_by_position() -> None:
    """Tensors with the same boxes in another order; of a plain tensor, each shard takes its part."""
    one, two = shardwise.zeros(chunks(0, 0, 1), 4, 4), shardwise.rand(chunks(0, 0, 1), 4, 4)
    assert one.copy_(two) is one
    assert torch.equal(whole(one), whole(two))
    turned = shardwise.zeros(boxes(([2, 0], [2, 4], 1), ([0, 0], [2, 4], 0)), 4, 4, requires_grad=True)
    turned.grad = two
    turned.data = two
    assert torch.equal(whole(turned), whole(two))
    assert torch.equal(whole(turned.grad), whole(two))
    assert torch.equal(whole(one.copy_(torch.arange(4.0))), torch.arange(4.0).expand(4, 4))
    with pytest.raises(ValueError, match="expected a tensor that is sharded as"):
        one.data = torch.ones(4, 4)


@ranks(2)
def test_a_shard_of_another_dtype_changes_the_tensor() -> None:
    """Whoever assigns to a shard changes what the tensor says of itself, and what is saved can be loaded."""
    tensor = shardwise.zeros(chunks(0, 0, 1), 4)
    for shard in tensor.local_shards():
        shard.tensor = shard.tensor.half()
    assert tensor.dtype is tensor.clone().dtype is torch.float16
    assert tensor.metadata().tensor_properties.dtype is torch.float16
    assert pickle.loads(pickle.dumps(tensor)).dtype is torch.float16


@ranks(2)
def test_arguments_may_be_given_by_name() -> None:
    """As torch allows."""
    tensor = shardwise.ones(chunks(0, 0, 1), 4)
    assert torch.clone(input=tensor).shape == torch.zeros_like(input=tensor).shape == (4,)
    assert torch.numel(input=tensor) == 4
    assert torch.is_same_size(tensor, tensor)
    assert "local_shards" in dir(tensor)
    assert not hasattr(tensor, "__cuda_array_interface__")
    assert shardwise.zeros(chunks(0, 0, 1), 4, dtype=float).dtype is torch.float64


@ranks(2)
def test_a_sharded_tensor_can_be_a_parameter() -> None:
    """Of a module, which finds it, copies it and prints it."""
    model = torch.nn.Linear(4, 4, bias=False)
    model.weight = torch.nn.Parameter(shardwise.rand(chunks(0, 0, 1), 4, 4))
    assert isinstance(model.weight, torch.nn.Parameter)
    assert isinstance(model.weight, ShardedTensor)
    assert model.weight.requires_grad
    assert [name for name, _ in model.named_parameters()] == ["weight"]
    assert model.state_dict()["weight"].shape == (4, 4)
    twin = copy.deepcopy(model)
    assert isinstance(twin.weight, torch.nn.Parameter)
    assert twin.weight is not model.weight
    assert "Linear" in repr(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.weight.local_shards()[0].tensor.fill_(7)
    model.load_state_dict(other.state_dict())
    assert torch.equal(whole(model.weight), torch.full((4, 4), 7.0))


@ranks(4)
def test_a_notebook_shows_a_drawing() -> None:
    """With this rank's boxes outlined."""
    html = shardwise.ones(UNEVEN, *SIZE)._repr_html_()
    assert html.count('class="mark shard"') == 5
    assert html.count('class="here"') == [3, 0, 1, 1][dist.get_rank()]
    assert "7 × 6" in html


@ranks(2)
def test_ops_on_scalars_without_len() -> None:
    """As for a plain scalar."""
    with pytest.raises(TypeError, match="0-d tensor"):
        len(shardwise.ones(boxes(([], [], 0)), ()))
