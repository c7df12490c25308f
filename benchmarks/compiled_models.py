"""Models of transformers as one graph, beside the plain ones: `python -m benchmarks.compiled_models --help`.

Tiny Llama, GPT-2, BERT, ViT and Mixtral in float64 on four gloo ranks: tensor parallel, also in shares of 3 : 2 : 2 : 1
and with a rank that has nothing, and fully sharded. Printed are how many graphs were compiled on the rank that has most
(one of the forward and one of the backward), how many of these after the second step, and how far gradients are off, as
a part of the largest gradient.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

import shardwise
from benchmarks.table import print_lines
from shardwise import plans
from shardwise.testing import run_on_ranks

RANKS, STEPS = 4, 4
SHARES = (3, 2, 2, 1)
BATCH, LENGTH, WORDS = 8, 12, 64
SIZES: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 8, "num_hidden_layers": 2, "intermediate_size": 64}
DECODER: dict[str, Any] = {"vocab_size": WORDS, "max_position_embeddings": LENGTH, "num_key_value_heads": 8, **SIZES}


def _gpt2() -> nn.Module:
    sizes: dict[str, Any] = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 8}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=WORDS, **sizes))


def _mixtral() -> nn.Module:
    """With the experts of each token computed in batches: sizes do not depend on values."""
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=4, **DECODER))
    model.set_experts_implementation("batched_mm")
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)),
    "GPT-2": _gpt2,
    "BERT": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **SIZES)
    ),
    "ViT": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(image_size=8, patch_size=4, **SIZES)),
    "Mixtral": _mixtral,
}


def _tensor_parallel(weights: Sequence[int] | None) -> Callable[[nn.Module], nn.Module]:
    return lambda model: shardwise.shard_module(model, plans.tensor_parallel(model, weights=weights))


SET_UPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "tensor parallel": _tensor_parallel(None),
    "tensor parallel, 3 : 2 : 2 : 1": _tensor_parallel(SHARES),
    "tensor parallel, 2 : 1 : 1 : 0": _tensor_parallel((2, 1, 1, 0)),
    "fully sharded, 3 : 2 : 2 : 1": lambda model: shardwise.fully_shard(model, weights=SHARES),
}


@dataclass(frozen=True)
class Found:
    """What came of one model in one set-up."""

    graphs: int
    late: int  # compiled after the second step
    off: float


class Counted:
    """A backend that notes in which step it was given a graph."""

    def __init__(self) -> None:
        from torch._dynamo.backends.common import aot_autograd  # loads the compiler

        self.step = 0
        self.steps: list[int] = []
        self.backend = aot_autograd(fw_compiler=self._compile, bw_compiler=self._compile)

    def _compile(self, graph: Any, inputs: Any) -> Any:
        self.steps.append(self.step)
        return graph.forward


def measure(name: str, set_up: str) -> Found:
    """On every rank."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    plain = MODELS[name]().double().eval()  # without dropout
    model = SET_UPS[set_up](copy.deepcopy(plain))
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(3, WORDS, (BATCH, LENGTH), generator=generator)
    if name == "ViT":
        batch = torch.randn(BATCH, 3, 8, 8, dtype=torch.float64, generator=generator)
    counted = Counted()
    compiled = torch.compile(model, fullgraph=True, backend=counted.backend)
    sizes = [BATCH * share // sum(SHARES) for share in SHARES]
    own = batch.split(sizes)[dist.get_rank()]
    given = shardwise.from_local(own, sizes=sizes) if set_up.startswith("fully") else batch
    for counted.step in range(STEPS):
        model.zero_grad()
        compiled(given).logits.square().mean().backward()
    plain(batch).logits.square().mean().backward()
    grads = [(whole(one.grad), other.grad) for one, other in zip(model.parameters(), plain.parameters(), strict=True)]
    known = [(one, other) for one, other in grads if other is not None]
    largest = max(float(other.abs().max()) for _, other in known)
    off = max(float((one - other).abs().max()) for one, other in known) / largest
    return Found(len(counted.steps), sum(step > 1 for step in counted.steps), off)


def whole(tensor: Any) -> Any:
    """The plain tensor, sharded or not."""
    return tensor.full_tensor() if isinstance(tensor, shardwise.ShardedTensor) else tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name begins so")
    given = parser.parse_args()
    lines = [["", "", "graphs", "after the second step", "gradients off by"]]
    for name in (name for name in MODELS if name.startswith(given.only)):
        for set_up in SET_UPS:
            found = run_on_ranks(RANKS, measure, name, set_up, timeout=900)
            most = [max(getattr(one, field) for one in found) for field in ("graphs", "late", "off")]
            lines.append([name, set_up, str(most[0]), str(most[1]), f"{most[2]:.0e}"])
    print(f"Models as one graph on {RANKS} gloo ranks, {STEPS} steps in float64\n")
    print_lines(lines)


if __name__ == "__main__":
    from benchmarks import compiled_models  # as the ranks import it

    compiled_models.main()
