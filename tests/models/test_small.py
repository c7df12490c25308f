"""Small models of our own, for what larger ones do: each trains as its plain twin, however it is cut and fed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models.plans import columns, rows, uneven
from tests.models.twins import assert_trains_alike, joined, sharded, whole
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.testing import ranks

CUTS = {"rows": rows, "columns": columns, "uneven": uneven}
WORDS, WIDTH, LENGTH = 11, 8, 5


class Positions(nn.Module):
    """Word and position tables; the same table once more, turned, for the scores; a buffer that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions, self.kinds = (nn.Embedding(n, WIDTH) for n in (WORDS, 7, 2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.head.weight = self.words.weight
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        """A loss of next words."""
        kinds = self.kinds(torch.zeros(1, x.shape[1], dtype=torch.int64))
        hidden = self.words(x) + self.positions(torch.arange(x.shape[1])) + kinds + self.shift
        scores = self.head(self.norm(hidden))
        return functional.cross_entropy(scores.flatten(0, 1), y.flatten())


class Queries(nn.Module):
    """Learned queries look at the words; a layer is fed by nothing but a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.query = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.rand(3, WIDTH))
        self.prepare, self.attention = nn.Linear(WIDTH, WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        """A loss of the first words."""
        words = self.words(x)
        query = self.prepare(self.query)[None].expand(x.shape[0], -1, -1)
        seen, _ = self.attention(query, words, words, need_weights=False)
        return functional.cross_entropy(self.head(seen).mean(1), y[:, 0])


class Experts(nn.Module):
    """A router sends each word to two of four experts, which are found by index."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.router = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        """A loss of squares."""
        hidden = self.words(x).flatten(0, 1)
        weights, chosen = self.router(hidden).softmax(-1).topk(2)
        made = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            at, which = torch.where(chosen == number)
            made = made.index_add(0, at, expert(hidden[at]) * weights[at, which, None])
        return (made - self.words(y).flatten(0, 1)).square().mean()


class Recurrent(nn.Module):
    """Words through a recurrent layer with its own first state."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        options: dict[str, Any] = {"batch_first": True, "num_layers": 2, "bidirectional": kind == "GRU"}
        if kind == "LSTM with projection":
            options["proj_size"] = 3
        layer = {"RNN": nn.RNN, "GRU": nn.GRU}.get(kind, nn.LSTM)
        self.layer = layer(WIDTH, 6, **options)
        self.head = nn.LazyLinear(WORDS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        """A loss of next words."""
        made, _ = self.layer(self.words(x))
        return functional.cross_entropy(self.head(made).flatten(0, 1), y.flatten())


class Block(nn.Module):
    """Causal attention and two layers, with residuals; keys and values of earlier words may come along."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Any, cache: list[Any] | None = None) -> Any:
        """The same size; a cache is given what this call adds."""
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        if cache is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(cache, (k, v), strict=True)) if cache else (k, v)
            cache[:] = [k, v]
        causal = cache is None or k.shape[2] == q.shape[2]
        made = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        x = x + self.out(made.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


class Decoder(nn.Module):
    """Blocks, whose activations are kept or computed again."""

    def __init__(self, again: str = "") -> None:
        super().__init__()
        self.again = again
        self.words, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        """A loss of next words."""
        hidden = self.words(x)
        for block in self.blocks:
            if self.again:
                hidden = checkpoint(block, hidden, use_reentrant=self.again == "reentrant")
            else:
                hidden = block(hidden)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())

    def continued(self, ids: Any, steps: int) -> Any:
        """Words that the model finds likely behind these, one by one, with caches."""
        caches: list[list[Any]] = [[] for _ in self.blocks]
        new = ids
        for _ in range(steps):
            hidden = self.words(new)
            for block, cache in zip(self.blocks, caches, strict=True):
                hidden = block(hidden, cache)
            new = self.head(hidden[:, -1:]).argmax(-1)
            ids = torch.cat([ids, new], 1)
        return ids


MODELS = {
    "position tables and tied weights": Positions,
    "learned queries": Queries,
    "experts by index": Experts,
    "attention": Decoder,
    "computed again": lambda: Decoder("without reentering"),
    "computed again, reentrant": lambda: Decoder("reentrant"),
    **{kind: lambda kind=kind: Recurrent(kind) for kind in ("RNN", "GRU", "LSTM", "LSTM with projection")},
}


def made(name: str) -> nn.Module:
    """The model in float64, the same on every rank."""
    torch.manual_seed(0)
    model: nn.Module = MODELS[name]().double()
    model(**words())
    return model.double()


def loss_of(model: nn.Module, **inputs: Any) -> Any:
    """What these models give."""
    return model(**inputs)


def words() -> dict[str, Any]:
    """Words and those that follow them."""
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(WORDS, (4, LENGTH), generator=generator, device="cpu") for _ in range(2)]
    return {name: ids.to(torch.get_default_device()) for name, ids in zip(("x", "y"), drawn, strict=True)}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", MODELS)
@ranks(2)
def test_a_model_trains_as_its_twin(name: str, cut: str) -> None:
    """Loss and every gradient, from plain inputs or from each rank's own; from the others below, and on four ranks."""
    plain = made(name)
    inputs = words() if cut == "uneven" else joined(words())
    assert_trains_alike(sharded(plain, CUTS[cut]), plain, inputs, words(), loss_of)


@pytest.mark.parametrize("name", ["position tables and tied weights", "experts by index", "attention", "LSTM"])
@ranks(4)
def test_on_four_ranks(name: str) -> None:
    """Where some ranks hold nothing of a small parameter, or of the batch."""
    plain = made(name)
    for cut, inputs in ((rows, words()), (columns, words()), (columns, joined(words())), (uneven, joined(words()))):
        assert_trains_alike(sharded(plain, cut), plain, inputs, words(), loss_of)


@pytest.mark.parametrize("name", MODELS)
@ranks(2)
def test_nothing_is_gathered_for_a_model(name: str) -> None:
    """At a gather budget of zero, as it must be for models of real size."""
    plain = made(name)
    with shardwise.gather_budget(0):
        for cut in CUTS.values():
            assert_trains_alike(sharded(plain, cut), plain, words(), words(), loss_of)


@ranks(2)
def test_words_are_continued_alike() -> None:
    """With caches of keys and values that grow by one word at a time."""
    plain = made("attention")
    assert isinstance(plain, Decoder)
    ids = words()["x"]
    with torch.no_grad():
        expected = plain.continued(ids, 4)
        for cut in CUTS.values():
            twin = sharded(plain, cut)
            assert isinstance(twin, Decoder)
            assert torch.equal(whole(twin.continued(ids, 4)), expected)
            own = shardwise.from_local(ids.split([3, 1])[dist.get_rank()])
            assert torch.equal(whole(twin.continued(own, 4)), expected)
