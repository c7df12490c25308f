"""Transfers of full graphs that begin early and end late: in which order, and that values stay as they are."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.compilation.test_full_graph import assert_same_gradients
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch.nn import functional

import shardwise
from shardwise.compilation.full_graph import early_transfers, graph_ops
from shardwise.compilation.full_graph.dynamic_sizes import DynamicSizes
from shardwise.compilation.full_graph.early_transfers import MOST, begin_early
from shardwise.nn.fully_sharded import Precision
from shardwise.testing import ranks

WIDTH = 6
ops = torch.ops.shardwise
BEGINS = {ops.begin.default, ops.begin_of_size.default}
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


class Block(nn.Module):
    """A layer of four parameters, two products in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        """Of rows."""
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Early:
    """A compiler that changes graphs, keeps them, and runs them op by op."""

    def __init__(self, *, delays: bool = False) -> None:
        self.delays = delays
        self.graphs: list[torch.fx.Graph] = []
        self.split: list[int] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        """The forward of the changed graph."""
        self.split.append(begin_early(module, delays=self.delays))
        self.graphs.append(module.graph)
        return make_boxed_func(module.forward)


def plain_model(layers: int = 4) -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(layers))).double()


def samples(sizes: Sequence[int]) -> tuple[torch.Tensor, Any]:
    """All samples, and this rank's."""
    x = torch.randn(sum(sizes), WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(sizes)))
    return x, shardwise.from_local(x.split(list(sizes))[dist.get_rank()], sizes=list(sizes))


def train(plain: nn.Module, model: nn.Module, compiled: Any, sizes: Sequence[int]) -> None:
    """A step of each, whose gradients are equal."""
    x, mine = samples(sizes)
    for run, parameters, rows in ((plain, plain, x), (compiled, model, mine)):
        parameters.zero_grad()
        run(rows).square().mean().backward()
    assert_same_gradients(model, plain)
    assert not graph_ops._under_way, "each transfer that has begun has ended"


def order(graph: torch.fx.Graph) -> str:
    """For each first half b, for each second half f, for several products p."""
    letters = [
        "b" if node.target in BEGINS else "f" if node.target is ops.finish.default else "p"
        for node in graph.nodes
        if node.target in PRODUCTS | BEGINS | {ops.finish.default}
    ]
    return "".join(letters).replace("pppp", "P").replace("pp", "P")


def early_products(graph: torch.fx.Graph) -> tuple[int, int]:
    """How many products are computed while a transfer is under way, of how many."""
    products, under_way, early = 0, 0, 0
    for node in graph.nodes:
        under_way += (node.target in BEGINS) - (node.target is ops.finish.default)
        products += node.target in PRODUCTS
        early += node.target in PRODUCTS and under_way > 0
    return early, products


def early_lines(code: str) -> tuple[int, int]:
    """The same of code that inductor has written."""
    products, under_way, early = 0, 0, 0
    for line in code[code.index("def call(") :].splitlines():
        under_way += ("= torch.ops.shardwise.begin" in line) - ("= torch.ops.shardwise.finish" in line)
        if "extern_kernels." in line:
            products += 1
            early += under_way > 0
    return early, products


@ranks(2)
def test_layers_are_gathered_ahead_and_gradients_summed_behind() -> None:
    """The next layer comes while one computes; sums of two layers go on while others compute."""
    plain = plain_model()
    model, early = shardwise.fully_shard(copy.deepcopy(plain), weights=[3, 1]), Early()
    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=early, bw_compiler=early))
    for _ in range(2):
        train(plain, model, compiled, [4, 3])
    assert early.split == [4, 4]
    assert order(early.graphs[0]) == "bbfPbfPbfPfP"
    assert order(early.graphs[1]) == "PbPbPfbPfbff"


@ranks(2)
def test_a_rank_that_has_nothing() -> None:
    """Begins the same transfers as the others, in their order."""
    plain = plain_model()
    model, early = shardwise.fully_shard(copy.deepcopy(plain), weights=[1, 0]), Early()
    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=early, bw_compiler=early))
    train(plain, model, compiled, [0, 3])
    train(plain, model, compiled, [4, 3])
    assert order(early.graphs[0]).startswith("bbf")


@ranks(2)
def test_tokens_chain_all_halves_in_order() -> None:
    """Whatever a compiler does with the order of ops, halves stay in theirs, and operands live until the second one."""
    plain = plain_model(3)
    model, early = shardwise.fully_shard(copy.deepcopy(plain)), Early()
    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=early, bw_compiler=early))
    train(plain, model, compiled, [2, 2])
    for graph in early.graphs:
        token, open_now, most = None, {}, 0
        for node in graph.nodes:
            if node.target in BEGINS:
                assert token is None or node.args[0] is token
                token = next(one for one in node.users if one.args[1] == 0)
                open_now[token] = node.args[1]
            elif node.target is ops.finish.default:
                assert node.args[0] is token
                assert open_now.pop(node.args[1]) == node.args[3]
                token = node
            most = max(most, len(open_now))
        assert not open_now
        assert most == MOST
        assert token in graph.output_node().all_input_nodes


@ranks(2)
def test_casts_come_forward_with_their_transfer() -> None:
    """Parameters that are gathered in another dtype are gathered ahead, too."""
    precision = Precision(torch.float32, torch.float32)
    model, early = shardwise.fully_shard(plain_model(), precision=precision), Early()
    eager = shardwise.fully_shard(plain_model(), precision=precision)
    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=early, bw_compiler=early))
    _, mine = samples([2, 3])
    for run in (eager, compiled):
        run(mine).square().mean().backward()
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad.full_tensor())
    assert order(early.graphs[0]).startswith("bbfPbfP")


@ranks(2)
def test_batches_of_many_sizes() -> None:
    """Begin transfers early in code for many sizes, too."""
    plain = plain_model(3)
    model, early = shardwise.fully_shard(copy.deepcopy(plain)), Early()
    sizes = DynamicSizes(early)
    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=sizes, bw_compiler=sizes))
    for first in (4, 6, 9, 5):
        train(plain, model, compiled, [first, 3])
    assert sizes.compilations == 4
    assert [node.target for node in early.graphs[2].nodes if node.target in BEGINS] == [ops.begin_of_size.default] * 3


@ranks(2)
def test_results_that_are_used_at_once_stay_one_op() -> None:
    """As those of a model whose layers wait for each other's sums."""
    plain = plain_model(2)
    model, early = copy.deepcopy(plain), Early()
    shardwise.shard_module(model, {"*.up.*": 0, "*.down.weight": 1})
    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=early, bw_compiler=early))
    x, _ = samples([3, 2])
    for run, parameters in ((plain, plain), (compiled, model)):
        parameters.zero_grad()
        run(x).square().mean().backward()
    assert_same_gradients(model, plain)
    assert early.split[0] == 0
    assert any(node.target is ops.transfer.default for node in early.graphs[0].nodes)


@ranks(2)
def test_gradients_of_weights_are_computed_while_those_of_activations_travel() -> None:
    """On an accelerator: what the next transfer waits for is computed before it begins, and nothing else."""
    plain = plain_model(3)
    model, early = copy.deepcopy(plain), Early(delays=True)
    shardwise.shard_module(model, {"*.up.*": 0, "*.down.weight": 1})
    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=early, bw_compiler=early))
    x, _ = samples([3, 2])
    for _ in range(2):
        for run, parameters in ((plain, plain), (compiled, model)):
            parameters.zero_grad()
            run(x).square().mean().backward()
        assert_same_gradients(model, plain)
    assert early_products(early.graphs[0]) == (0, 6)
    assert early_products(early.graphs[1]) == (10, 12)


@ranks(2)
def test_products_stay_behind_a_transfer_that_the_next_one_waits_for() -> None:
    """A transfer that takes what the last one brings does not draw products of layers before from their transfers."""

    def function(x: Any, w: torch.Tensor) -> tuple[Any, ...]:
        first = (w @ w) @ w
        moved = x.redistribute(None)
        second = first @ w
        return moved.redistribute(1).redistribute(None) + 1, second

    early, plain, w = Early(delays=True), torch.arange(24.0).reshape(4, 6), torch.ones(3, 3)
    compiled = torch.compile(
        function, fullgraph=True, backend=aot_autograd(fw_compiler=early, inference_compiler=early)
    )
    with torch.no_grad():
        moved, second = compiled(shardwise.shard(plain, 0), w)
    assert torch.equal(moved.full_tensor(), plain + 1)
    assert torch.equal(second, w @ w @ w @ w)
    assert order(early.graphs[0]) == "bpfbPf"


@ranks(2)
def test_a_first_half_without_a_second_one_is_let_go_of() -> None:
    """As after an error in a kernel between both."""
    plain = plain_model(2)
    model, early = shardwise.fully_shard(copy.deepcopy(plain)), Early()
    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=early, bw_compiler=early))
    train(plain, model, compiled, [2, 2])
    first: Any = next(node for node in early.graphs[0].nodes if node.target in BEGINS)
    operands = [torch.zeros(one.meta["val"].shape, dtype=torch.float64) for one in first.args[1]]
    token, *_ = ops.begin(torch.zeros(()), operands, first.args[2])
    (moving,) = graph_ops._under_way.values()
    moving.wait()
    del token, moving
    assert not graph_ops._under_way
    train(plain, model, compiled, [2, 2])


@ranks(2)
def test_a_transfer_ends_before_its_operand_is_written() -> None:
    """For it may be sent until then, as it lies."""
    early = Early()

    def function(t: Any, w: torch.Tensor) -> tuple[Any, torch.Tensor]:
        moved = t.redistribute(1)
        product = w @ w
        t.add_(1)
        return moved, product

    backend = aot_autograd(fw_compiler=early, inference_compiler=early, keep_inference_input_mutations=True)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    whole, w = torch.arange(24.0).reshape(4, 6), torch.ones(3, 3)
    t = shardwise.shard(whole.clone(), 0)
    with torch.no_grad():
        moved, product = compiled(t, w)
    assert torch.equal(moved.full_tensor(), whole)
    assert torch.equal(t.full_tensor(), whole + 1)
    assert torch.equal(product, w @ w)
    targets = [node.target for node in early.graphs[0].nodes]
    finish, write = targets.index(ops.finish.default), targets.index(torch.ops.aten.copy_.default)
    assert targets.index(torch.ops.aten.mm.default) < finish < write


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@ranks(2)
def test_inductor_reads_results_behind_the_second_half() -> None:
    """Also without gradients, where inductor moves ops to their users, and by ops of several results."""

    def function(x: Any, w: torch.Tensor) -> tuple[Any, ...]:
        moved = x.redistribute(None)
        product = (w @ w + 1) @ w
        values, places = moved.sort(1)
        return values + 1, places, product, *x.redistribute(1).max(0)

    x, w = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.ones(8, 8)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # inductor's own imports
        compiled = torch.compile(function, fullgraph=True)
        values, places, product, most, at = compiled(shardwise.shard(x, 0), w)
    assert torch.equal(values.full_tensor(), x.sort(1).values + 1)
    assert torch.equal(places.full_tensor(), x.sort(1).indices)
    assert torch.equal(product, (w @ w + 1) @ w)
    assert torch.equal(most.full_tensor(), x.max(0).values)
    assert torch.equal(at.full_tensor(), x.max(0).indices)


@ranks(2)
def test_inductor_orders_graphs_without_transfers() -> None:
    """Its settings stay as they are there; it changes no order of a graph with transfers."""
    orders: list[tuple[bool, bool]] = []

    def noted(module: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        orders.append((inductor_config.reorder_for_locality, inductor_config.reorder_for_peak_memory))
        return make_boxed_func(module.forward)

    def compile(module: torch.fx.GraphModule, inputs: Any) -> Any:
        return aot_autograd(fw_compiler=early_transfers.with_early_transfers(noted))(module, inputs)

    x = shardwise.shard(torch.arange(12.0).view(4, 3), 0)
    with torch.no_grad():
        torch.compile(lambda x: x * 2, fullgraph=True, backend=compile)(x)
        torch.compile(lambda x: x.sum() * 2, fullgraph=True, backend=compile)(x)
    assert orders == [(inductor_config.reorder_for_locality, inductor_config.reorder_for_peak_memory), (False, False)]


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@ranks(2)
def test_inductor_keeps_the_order_and_the_memory() -> None:
    """With its own plan of memory, in which operands of a transfer that is under way must not be used again."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # inductor's own imports
        plain = plain_model(3)
        model = shardwise.fully_shard(copy.deepcopy(plain), weights=[3, 1])
        compiled = torch.compile(model, fullgraph=True)
        _, codes = run_and_get_code(train, plain, model, compiled, [4, 3])
        train(plain, model, compiled, [4, 3])
    early, products = early_lines(codes[1])
    assert early > products / 2


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@ranks(2)
def test_inductor_computes_gradients_of_weights_behind_transfers() -> None:
    """In the order that graphs have on an accelerator."""
    plain = plain_model(2)
    model = copy.deepcopy(plain)
    shardwise.shard_module(model, {"*.up.*": 0, "*.down.weight": 1})
    x, _ = samples([3, 2])
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # inductor's own imports
        patch.setattr(early_transfers, "_is_on_accelerator", lambda node: True)
        compiled = torch.compile(model, fullgraph=True)

        def step() -> None:
            for run, parameters in ((plain, plain), (compiled, model)):
                parameters.zero_grad()
                run(x).square().mean().backward()

        _, codes = run_and_get_code(step)
        assert_same_gradients(model, plain)
        step()
        assert_same_gradients(model, plain)
    assert early_lines(codes[1]) == (6, 8)
