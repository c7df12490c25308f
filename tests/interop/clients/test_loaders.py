"""Every way in which accelerate makes loaders, beside a sharded model: each sample once, in order, joined."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches  # type: ignore[import-untyped] # no types
from accelerate.data_loader import prepare_data_loader  # type: ignore[import-untyped] # no types
from tests.interop.clients.environment import launched
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, SubsetRandomSampler

from shardwise import ShardedTensor, shard_module
from shardwise.testing import ranks


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Rows without a length."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(self.rows)


class Collated:
    """Gives whole batches, for lists of numbers."""

    def __getitem__(self, numbers: list[int]) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([[float(k)] * 3 for k in numbers])}

    def __len__(self) -> int:
        return 20


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Row k is k, k, k, and wants its square."""
    return [{"x": torch.full((3,), float(k)).double(), "y": torch.tensor([k * k]).double()} for k in range(count)]


def linear() -> nn.Linear:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Linear(3, 1, dtype=torch.float64)


def prepared(data: Any, batch_size: int = 2, **config: Any) -> tuple[Any, Any, Any]:
    """An accelerator, a sharded model, and a loader as this configuration makes it."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    loader: Any = DataLoader(data, batch_size=batch_size)
    model, loader = accelerator.prepare(shard_module(linear(), {"weight": 1}), loader)
    return accelerator, model, loader


def seen(accelerator: Any, loader: Any) -> list[list[int]]:
    """The rows of each step of an epoch, of all ranks; the state of the loader knows the last step."""
    steps, ends = [], []
    for batch in loader:
        assert isinstance(batch["x"], ShardedTensor)
        steps.append(accelerator.gather_for_metrics(batch["x"])[:, 0].int().tolist())
        assert steps[-1] == batch["x"].full_tensor()[:, 0].int().tolist()
        ends.append(accelerator.gradient_state.end_of_dataloader)
    assert ends == [k == len(ends) - 1 for k in range(len(ends))]
    assert not accelerator.gradient_state.in_dataloader
    return steps


def steps_of(count: int, size: int) -> list[list[int]]:
    """The steps of one process with batches of this size."""
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


WAYS: dict[str, tuple[bool, int, dict[str, bool]]] = {  # a stream or not, the size of a batch, and the configuration
    "map": (False, 2, {}),
    "uneven": (False, 2, {"even_batches": False}),
    "split": (False, 6, {"split_batches": True}),
    "split and uneven": (False, 6, {"split_batches": True, "even_batches": False}),
    "dispatched": (False, 2, {"dispatch_batches": True}),
    "dispatched and split": (False, 6, {"dispatch_batches": True, "split_batches": True}),
    "stream, dispatched": (True, 2, {}),
    "stream, dispatched and split": (True, 6, {"split_batches": True}),
    "stream": (True, 2, {"dispatch_batches": False}),
    "stream, split": (True, 6, {"dispatch_batches": False, "split_batches": True}),
}


@pytest.mark.parametrize("way", WAYS)
@ranks(3)
def test_every_sample_is_dealt_out_once(way: str) -> None:
    """Whatever the count: ranks may have fewer rows, or none in the last step, or none at all. So for each epoch."""
    stream, size, config = WAYS[way]
    with launched():
        for count in (1, 2, 6, 7, 9, 12, 16):
            data: Any = Stream(rows(count)) if stream else rows(count)
            accelerator, _, loader = prepared(data, size, **config)
            for _ in range(2):
                assert seen(accelerator, loader) == steps_of(count, 6), (way, count)
            assert loader.iteration == 2


@pytest.mark.parametrize("way", [way for way in WAYS if "dispatched" not in way or "split" in way or "stream" in way])
@ranks(3)
def test_first_batches_are_skipped(way: str) -> None:
    """Also twice. Accelerate cannot skip with the first rank dealing out batches of a map: it skips a third."""
    stream, size, config = WAYS[way]
    with launched():
        for count in (7, 12, 16):
            data: Any = Stream(rows(count)) if stream else rows(count)
            accelerator, _, loader = prepared(data, size, **config)
            skipped = skip_first_batches(loader, 1)
            assert seen(accelerator, skipped) == steps_of(count, 6)[1:], (way, count)
            assert seen(accelerator, loader) == steps_of(count, 6)
            if not stream and count > 12:
                again = accelerator.skip_first_batches(skipped, 1)
                assert seen(accelerator, again) == steps_of(count, 6)[2:], (way, count)


@ranks(2)
def test_losses_and_gradients_are_those_of_one_process() -> None:
    """With rows left over, accumulated over two steps: the last step of an epoch is one on every rank."""
    for config in ({}, {"even_batches": False}, {"dispatch_batches": True}):
        with launched():
            accelerator = Accelerator(
                cpu=True, gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration(**config)
            )
            model, plain = shard_module(linear(), {"weight": 1}), linear()
            ours, theirs = (torch.optim.SGD(one.parameters(), lr=1e-4) for one in (model, plain))
            model, ours, loader = accelerator.prepare(model, ours, DataLoader(rows(9), batch_size=2))
            expected = list(DataLoader(rows(9), batch_size=4))
            for step, (batch, whole) in enumerate(zip(loader, expected, strict=True)):
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
                    accelerator.backward(loss)
                    ours.step()
                    ours.zero_grad()
                wanted = nn.functional.mse_loss(plain(whole["x"]), whole["y"])
                torch.testing.assert_close(accelerator.gather(loss), wanted)
                (wanted / 2).backward()
                if step in (1, 2):
                    theirs.step()
                    theirs.zero_grad()
            torch.testing.assert_close(model.weight.full_tensor(), plain.weight)


@ranks(2)
def test_samplers_of_ones_own() -> None:
    """A sampler of a part of the data set, a batch sampler in its place, and batches of different sizes."""
    with launched():
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
        accelerator.prepare(shard_module(linear(), {"weight": 1}))
        data: Any = rows(20)
        part = accelerator.prepare(DataLoader(data, batch_size=2, sampler=SequentialSampler(range(7))))
        assert seen(accelerator, part) == steps_of(7, 4)
        random = accelerator.prepare(DataLoader(data, batch_size=2, sampler=SubsetRandomSampler(range(7))))
        assert sorted(chain(*seen(accelerator, random))) == list(range(7))
        batches: Any = BatchSampler(SequentialSampler(range(7)), 2, drop_last=False)
        one = accelerator.prepare(DataLoader(Collated(), sampler=batches, batch_size=None))
        assert seen(accelerator, one) == steps_of(7, 4)
        assert seen(accelerator, skip_first_batches(one, 1)) == steps_of(7, 4)[1:]
        different: Any = [[0], [1, 2, 3], [4, 5], [6, 7], [8, 9, 10]]
        varied = accelerator.prepare(DataLoader(data, batch_sampler=different))
        assert seen(accelerator, varied) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
        dropped = accelerator.prepare(DataLoader(data, batch_size=3, drop_last=True))
        assert seen(accelerator, dropped) == steps_of(18, 6)


@ranks(2)
def test_a_shuffled_loader_skips_what_it_gave_before() -> None:
    """In a later epoch, whose order is another one."""
    with launched():
        accelerator, _, _ = prepared(rows(2), use_seedable_sampler=True)
        loader = accelerator.prepare(DataLoader(rows(11), batch_size=2, shuffle=True))
        first, second = seen(accelerator, loader), seen(accelerator, loader)
        assert first != second
        assert sorted(chain(*first)) == list(range(11))
        loader.set_epoch(1)
        assert seen(accelerator, skip_first_batches(loader, 1)) == second[1:]


@ranks(2)
def test_prepared_again_copied_and_made_without_an_accelerator() -> None:
    """All of these loaders deal out batches for the sharded model."""
    with launched():
        accelerator, _, loader = prepared(rows(7))
        assert accelerator.prepare(loader) is loader
        assert accelerator.prepare_data_loader(loader) is loader
        function = prepare_data_loader(DataLoader(rows(7), batch_size=2), put_on_device=True)
        sent = pickle.loads(pickle.dumps(loader))
        for one in (loader, copy.copy(loader), function, skip_first_batches(function, 0)):
            assert seen(accelerator, one) == steps_of(7, 4)
        for one in (copy.deepcopy(loader), sent):  # which have a state that no accelerator knows
            assert [batch["x"].full_tensor()[:, 0].int().tolist() for batch in one] == steps_of(7, 4)


@ranks(2)
def test_beside_a_plain_model_nothing_changes() -> None:
    """Loaders of an accelerator without sharded models are what they are, whatever another one has prepared."""
    with launched():
        accelerator, _, loader = prepared(rows(7))
        other = Accelerator(cpu=True)
        other.prepare(linear())
        own = other.prepare(DataLoader(rows(7), batch_size=2))
        for one in (own, skip_first_batches(own, 1)):
            batches = list(one)
            assert all(type(batch["x"]) is torch.Tensor and len(batch["x"]) == 2 for batch in batches)
        assert len(list(own)) == 2
        accelerator.free_memory()
        assert all(type(batch["x"]) is torch.Tensor for batch in loader)


@ranks(2)
def test_contexts_for_ddp_have_nothing_to_do() -> None:
    """`no_sync` and `join_uneven_inputs`: gradients are whole, and batches joined."""
    with launched():
        accelerator, model, loader = prepared(rows(7))
        with accelerator.no_sync(model), accelerator.join_uneven_inputs([model], even_batches=False):
            assert seen(accelerator, loader) == steps_of(7, 4)


@ranks(2)
def test_a_loader_that_is_left_early_starts_anew() -> None:
    """By a break after the first step."""
    with launched():
        accelerator, _, loader = prepared(rows(7))
        next(iter(loader))
        accelerator.gradient_state._remove_dataloader(loader)  # which accelerate does not do then
        assert seen(accelerator, loader) == steps_of(7, 4)


@ranks(2)
def test_what_a_batch_holds_beside_tensors() -> None:
    """A rank without rows has the words and numbers of one that has some."""
    with launched():
        data: Any = [(torch.ones(2) * k, {"name": f"row {k}", "scale": 2.0}) for k in range(3)]

        def collated(batch: list[Any]) -> Any:
            return torch.stack([one for one, _ in batch]), {"count": len(batch), "scale": torch.tensor(2.0)}

        accelerator = Accelerator(cpu=True)
        accelerator.prepare(shard_module(linear(), {"weight": 1}))
        loader = accelerator.prepare(DataLoader(data, batch_size=1, collate_fn=collated))
        steps = list(loader)
        assert [step[0].full_tensor().tolist() for step in steps] == [[[0.0, 0.0], [1.0, 1.0]], [[2.0, 2.0]]]
        assert [step[1] for step in steps] == [{"count": 1, "scale": torch.tensor(2.0)}] * 2
        assert len(steps[1][0].local_tensor()) == (1 if dist.get_rank() == 0 else 0)


@ranks(2)
def test_a_rank_that_cannot_read_fails_on_every_rank() -> None:
    """What its data set raises, all ranks raise."""

    class Broken:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 6:
                raise OSError("row 6 cannot be read")
            return torch.ones(2) * index

    with launched():
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(shard_module(linear(), {"weight": 1}))
        loader = accelerator.prepare(DataLoader(Broken(), batch_size=2))
        with pytest.raises(Exception, match="row 6 cannot be read"):
            list(loader)
