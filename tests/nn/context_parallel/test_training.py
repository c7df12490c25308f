"""Models of transformers on sequences in pieces, beside their plain twins: losses and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import assert_close
from tests.models.twins import assert_same_gradients, whole
from torch import nn

import shardwise
from shardwise import plans
from shardwise.comm.tracing import trace
from shardwise.errors import PlanError, PropertyError, ShardwiseError
from shardwise.testing import ranks

SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def made(name: str, **options: Any) -> nn.Module:
    """A small model of this kind."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL, **HEADS, **options)
    return in_double(getattr(transformers, f"{name}ForCausalLM")(config))


def in_double(model: Any) -> nn.Module:
    """The model with a loss in float64: that of transformers is always in float32."""

    def loss(logits: Any, labels: Any, vocab_size: int, shift_labels: Any = None, **others: Any) -> Any:
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
        return nn.functional.cross_entropy(logits.view(-1, vocab_size), shift_labels.reshape(-1))

    loss.__name__ = "ForCausalLMLoss"
    model.loss_function = loss
    made: nn.Module = model.double().train()
    return made


def tokens(samples: int, length: int, seed: int = 1) -> torch.Tensor:
    """The same on every rank."""
    return torch.randint(61, (samples, length), generator=torch.Generator().manual_seed(seed))


def assert_trains_alike(plain: nn.Module, plan: Any, inputs: dict[str, Any], expected: dict[str, Any]) -> nn.Module:
    """Two steps; the second one runs programs, and sends the same."""
    twin = shardwise.shard_module(copy.deepcopy(plain), plan)
    plain.zero_grad()
    loss = plain(**expected, use_cache=False).loss
    loss.backward()
    for _ in range(2):
        twin.zero_grad()
        found = twin(**plan.cut(inputs)).loss
        assert_close(whole(found).detach(), loss.detach())
        found.backward()
        assert_same_gradients(twin, plain)
    return twin


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("pieces", [1, 2, 3])
@ranks(4)
def test_llama(pieces: int, samples: int) -> None:
    """In one, two or three pieces a rank, of a length that nothing divides; parameters fully sharded."""
    ids = tokens(samples, 37)
    batch = {"input_ids": ids, "labels": ids}
    assert_trains_alike(made("Llama"), plans.context_parallel(pieces=pieces), batch, batch)


@ranks(4)
def test_short_sequences() -> None:
    """Some ranks have no token at all."""
    ids = tokens(1, 3)
    batch = {"input_ids": ids, "labels": ids}
    assert_trains_alike(made("Llama"), plans.context_parallel(), batch, batch)


@ranks(4)
def test_replicated_parameters() -> None:
    """Every rank keeps all parameters; ranks of unequal speed have unequal pieces."""
    ids = tokens(2, 29)
    batch = {"input_ids": ids, "labels": ids}
    plan = plans.context_parallel(parameters=None, weights=[3, 1, 1, 1])
    assert_trains_alike(made("Llama"), plan, batch, batch)
    lengths = plan.cut(ids).sharding.elements_by_rank()
    assert lengths[0] > 2 * lengths[1]


@pytest.mark.parametrize("name", ["Mistral", "Qwen2"])
@ranks(4)
def test_sliding_windows(name: str) -> None:
    """Windows of layers, all or some of them, are shorter than a piece and longer than one."""
    for window in (3, 20):
        options: dict[str, Any] = {"sliding_window": window}
        if name == "Qwen2":
            options.update(use_sliding_window=True, max_window_layers=1)
        ids = tokens(1, 37)
        batch = {"input_ids": ids, "labels": ids}
        assert_trains_alike(made(name, **options), plans.context_parallel(), batch, batch)


@ranks(4)
def test_packed_documents() -> None:
    """Documents that are packed into one sequence do not see each other: positions that begin anew say where."""
    ids = tokens(1, 41)
    positions = torch.cat([torch.arange(n) for n in (7, 1, 20, 13)]).unsqueeze(0)
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions}
    assert_trains_alike(made("Llama"), plans.context_parallel(), batch, batch)


@pytest.mark.parametrize("side", ["left", "right"])
@ranks(4)
def test_padded_samples(side: str) -> None:
    """A mask of padded tokens gives the losses and gradients of the tokens that count."""
    ids, mask = tokens(3, 23), torch.ones(3, 23, dtype=torch.int64)
    for sample, count in enumerate((4, 0, 11)):
        mask[sample, slice(0, count) if side == "left" else slice(23 - count, 23)] = 0
    labels = ids.masked_fill(mask == 0, -100)
    positions = (mask.cumsum(1) - 1).clamp(min=0) if side == "left" else torch.arange(23).expand(3, 23)
    if side == "left":  # the first token behind padding is predicted from padding
        labels[:, 1:][(mask[:, 1:] == 1) & (mask[:, :-1] == 0)] = -100
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask, "position_ids": positions}
    assert_trains_alike(made("Llama"), plans.context_parallel(), batch, batch)


@ranks(2)
def test_padding_inside_a_document() -> None:
    """Raises on every rank, for what lies behind would not see what lies before; between documents it is right."""
    plan, ids = plans.context_parallel(), tokens(2, 7)
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 3:5] = 0
    counted = (mask.cumsum(1) - 1).clamp(min=0)  # as some tokenizers' users number tokens
    filled = counted.masked_fill(mask == 0, 1)
    for positions in (None, torch.arange(7).unsqueeze(0), counted, filled):
        batch = {"input_ids": ids, "attention_mask": mask}
        batch |= {} if positions is None else {"position_ids": positions}
        with pytest.raises(PropertyError, match=r"sample 1 has zeros at tokens 3 to 4, .* begin anew"):
            plan.cut(batch)
    documents = torch.tensor([[0, 1, 2, 3, 4, 0, 1]])  # the first one is padded behind, in sample 1
    found = plan.cut({"input_ids": ids, "attention_mask": mask, "position_ids": documents})
    assert found["documents"] == "0,5;0,3,5"


@ranks(4)
def test_samples_along_another_axis() -> None:
    """Two rows of ranks with samples of their own, three and one, each sequence over the ranks of a row."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    ids = tokens(4, 19)
    mine = ids[:3] if dist.get_rank() < 2 else ids[3:]
    positions = torch.arange(19).expand(4, 19).clone()
    positions[3, 6:] -= 6
    own = positions[:3] if dist.get_rank() < 2 else positions[3:]
    inputs = {"input_ids": mine, "labels": mine, "position_ids": own}
    expected = {"input_ids": ids, "labels": ids, "position_ids": positions}
    assert_trains_alike(made("Llama"), plans.context_parallel(mesh), inputs, expected)


@ranks(2)
def test_recomputed_layers() -> None:
    """With activations that are computed again in the backward."""
    ids = tokens(1, 21)
    batch = {"input_ids": ids, "labels": ids}
    plain = made("Llama")
    loss = plain(**batch, use_cache=False).loss
    loss.backward()
    twin: Any = made("Llama")
    twin.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    plan = plans.context_parallel()
    shardwise.shard_module(twin, plan)
    twin(**plan.cut(batch)).loss.backward()
    assert_same_gradients(twin, plain)


@ranks(2)
def test_dropout() -> None:
    """Attention of a twin in training drops what the plain model drops."""
    ids = tokens(1, 21)
    batch = {"input_ids": ids, "labels": ids}
    plain = made("Llama", attention_dropout=0.3)
    plan = plans.context_parallel()
    twin = shardwise.shard_module(copy.deepcopy(plain), plan)
    torch.manual_seed(4)
    loss = plain(**batch, use_cache=False).loss
    loss.backward()
    torch.manual_seed(4)
    found = twin(**plan.cut(batch)).loss
    assert_close(whole(found).detach(), loss.detach())
    found.backward()
    assert_same_gradients(twin, plain)


@ranks(2)
def test_only_keys_values_and_parameters_travel() -> None:
    """Between layers, in norms, in position embeddings and in the loss, no token moves."""
    ids = tokens(2, 32)
    plan = plans.context_parallel(parameters=None)
    twin = shardwise.shard_module(made("Llama"), plan)
    batch = plan.cut({"input_ids": ids, "labels": ids})
    for _ in range(2):
        with trace() as seen:
            twin(**batch)
    own = [one for one in seen.events if "attention" not in one.op and one.sent > 1000]
    assert not own, [str(one) for one in own]


@ranks(2)
def test_plain_batches_still_work() -> None:
    """A model takes plain batches as before, with their masks; a mask beside pieces is an error."""
    plain = made("Llama")
    plan = plans.context_parallel(parameters=None)
    twin = shardwise.shard_module(copy.deepcopy(plain), plan)
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :3] = 0
    with torch.no_grad():
        expected = plain(input_ids=ids, attention_mask=mask).logits
        assert_close(whole(twin(input_ids=ids, attention_mask=mask).logits), expected)
        with pytest.raises(PlanError, match="cut"):
            twin(input_ids=plan.cut(ids), attention_mask=mask)


def own_documents(rank: int) -> list[torch.Tensor]:
    """Documents of this rank: several, one, none, and one of a single token."""
    lengths = ([5, 9, 2], [13], [], [1, 7])[rank]
    return [tokens(1, length, seed=10 * rank + k)[0] for k, length in enumerate(lengths)]


@pytest.mark.parametrize("nested", [False, True])
@ranks(4)
def test_packed_documents_of_each_rank(nested: bool) -> None:
    """Each rank has as many tokens as it has; loss and gradients are those of all documents, and nothing is attended
    across ranks."""
    plan, plain = plans.context_parallel(), made("Llama")
    documents = own_documents(dist.get_rank())
    if nested and documents:
        jagged = torch.nested.nested_tensor(documents, layout=torch.jagged)
        mine: dict[str, Any] = {"input_ids": jagged, "labels": jagged}
    else:
        ids = torch.cat([*documents, torch.zeros(0, dtype=torch.int64)]).unsqueeze(0)
        positions = torch.cat([torch.arange(len(one)) for one in [*documents, ids[0, :0]]]).unsqueeze(0)
        labels = torch.where(positions == 0, -100, ids)
        mine = {"input_ids": ids, "labels": labels, "position_ids": positions}
    every = [one for rank in range(4) for one in own_documents(rank)]
    losses = [
        nn.functional.cross_entropy(plain(one.unsqueeze(0)).logits[0, :-1], one[1:], reduction="sum") for one in every
    ]
    expected = torch.stack(losses).sum() / sum(len(one) - 1 for one in every)
    expected.backward()
    twin = shardwise.shard_module(copy.deepcopy(plain), plan)
    for _ in range(2):
        twin.zero_grad()
        batch = plan.join(mine)
        assert batch["documents"] == "0,5,14,16,29,30"
        with trace() as record:
            found = twin(**batch).loss
        assert not [event for event in record.events if event.op == "attention"]
        assert_close(whole(found).detach(), expected.detach())
        found.backward()
        assert_same_gradients(twin, plain)


@ranks(2)
def test_what_cannot_be_joined() -> None:
    """Several samples on one rank, and other tensors on another one: every rank raises."""
    plan = plans.context_parallel()
    with pytest.raises(PropertyError, match="one sample"):
        plan.join({"input_ids": tokens(1 + dist.get_rank(), 3)})
    with pytest.raises(ShardwiseError):
        plan.join({"input_ids": tokens(1, 3), **({"labels": tokens(1, 3)} if dist.get_rank() else {})})
