"""`context_parallel`: the plan under which each rank has pieces of every sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.group import is_member, mesh_group, or_default, rank_array
from shardwise.errors import PlanError
from shardwise.layout.placement import device_for, mesh_ranks
from shardwise.layout.specs.chunking import parse_weights
from shardwise.nn.context_parallel.batches import cut_batch
from shardwise.nn.context_parallel.joining import join_batches
from shardwise.nn.context_parallel.pieces import RankGrid
from shardwise.nn.fully_sharded import FullyShard, fully_shard
from shardwise.tensor import ShardedTensorBase
from shardwise.torch_private import pytree

M = TypeVar("M", bound=nn.Module)
FULLY_SHARDED = FullyShard()
IMPLEMENTATION = "shardwise"  # the name of the attention that transformers calls for sequences in pieces


@dataclass(frozen=True)
class ContextParallel:
    """A plan that `context_parallel` makes: for `shard_module`, and for batches."""

    parameters: FullyShard | None
    pieces: int
    weights: tuple[float, ...] | None
    mesh: DeviceMesh | None
    process_group: ProcessGroup | None

    def apply(self, model: M, src_rank: int = 0) -> M:
        """Shard the parameters of a model in place, and let it take sequences in pieces. Every rank calls it."""
        group = self._group
        if self.parameters is None:
            kind = device_for(next((one.device.type for one in model.parameters()), "cpu"), group)
            column = DeviceMesh(kind, rank_array(group)[:, None].tolist(), mesh_dim_names=("replicas", "one"))
            fully_shard(model, mesh=column, src_rank=src_rank)
        else:
            fully_shard(model, **self.parameters.options(), src_rank=src_rank, process_group=group)
        _take_pieces(model)
        return model

    def cut(self, batch: Any) -> Any:
        """A batch, of which each rank takes its pieces of every sequence, as sharded tensors.

        Every rank calls it, with the same batch; on a mesh of two axes, the ranks along the first one have samples of
        their own. In tensors of two dims or more, the first is that of samples, the second that of positions; all else
        stays as it is. One small message travels, and none of the data.

        A mapping with ``input_ids`` or ``inputs_embeds`` is for a model of transformers. It gets ``position_ids``, and
        ``shift_labels`` beside ``labels``: what the next token is, also where that lies on another rank. Where given
        ``position_ids`` begin anew, a document begins that sees no other. A mask of padded tokens (``attention_mask``,
        on either side, not inside a document) is turned into documents, too.
        """
        return cut_batch(batch, self._grid, self._group)

    def join(self, batch: Any) -> Any:
        """The packed batches of all ranks as one sequence, of which each rank keeps its own documents, as they are.

        Every rank calls it with its own batch: tensors of one sample, in which documents lie one behind another, of any
        number of tokens; or nested tensors (jagged), of which each row is a document. As in `cut`, ``position_ids``
        that begin anew tell where documents begin, and ``shift_labels`` are added. No document sees another one, so
        attention sends nothing.
        """
        return join_batches(batch, self._group)

    @property
    def _group(self) -> ProcessGroup:
        if self.mesh is not None:
            return mesh_group(self.mesh, self.process_group)
        return or_default(self.process_group)

    @property
    def _grid(self) -> RankGrid:
        ranks = rank_array(self._group) if self.mesh is None else mesh_ranks(self.mesh)
        rows = ranks.reshape(-1, ranks.shape[-1]).tolist()
        return RankGrid(tuple(map(tuple, rows)), self.pieces, self.weights)


def context_parallel(
    mesh: DeviceMesh | None = None,
    *,
    parameters: FullyShard | None = FULLY_SHARDED,
    pieces: int = 2,
    weights: Sequence[float] | None = None,
    process_group: ProcessGroup | None = None,
) -> ContextParallel:
    """The plan under which each rank has pieces of every sequence, of any length, and computes whole layers on them.

    With two ``pieces`` (the default), a rank has one from the front and one from the back of each sequence, so that
    causal attention is as much work on every rank; with one, a single stretch. ``weights`` has a number for each rank,
    and pieces are in proportion. On a ``mesh`` of two axes, sequences are cut along the second one, and the ranks along
    the first have samples of their own.

    ``parameters`` are sharded as the options of a `FullyShard` say; None: every rank keeps all of them. Loss and
    gradients are those of the whole sequences::

        >>> plan = shardwise.plans.context_parallel()
        >>> model = shardwise.shard_module(torch.nn.Embedding(50, 8), plan)
        >>> tokens = torch.arange(11).reshape(1, 11)
        >>> batch = plan.cut(tokens)
        >>> batch.sharding.boxes.offsets[:, 1].tolist(), batch.sharding.ranks.tolist()
        ([0, 2, 5, 8], [0, 1, 1, 0])
        >>> model(batch).sum().backward()
    """
    if isinstance(pieces, bool) or not isinstance(pieces, int) or pieces < 1:
        raise PlanError(f"pieces is how many pieces of a sequence a rank has; found {pieces!r:.80}")
    if mesh is not None and mesh.ndim > 2:
        raise PlanError(f"sequences are cut along the last of two axes of a mesh; this one has {mesh.ndim}")
    plan = ContextParallel(parameters, pieces, None, mesh, process_group)
    group = plan._group
    if not is_member(group):
        raise PlanError("this rank is not in the group whose ranks have the sequences")
    shares = None if weights is None else parse_weights(weights, len(plan._grid.ranks[0]))
    return ContextParallel(parameters, pieces, shares, mesh, process_group)


# Models of transformers ----------------------------------------------------------------------------------------------


def _take_pieces(model: nn.Module) -> None:
    """Let a model of transformers call the attention that takes pieces, where its arguments are sharded."""
    config: Any = getattr(model, "config", None)
    before = getattr(config, "_attn_implementation", None)
    if before is None or not hasattr(model, "set_attn_implementation"):
        return
    every = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    chosen = [(one, one._attn_implementation) for one in every if hasattr(one, "_attn_implementation")]
    for one, _ in chosen:
        if hasattr(one, "use_cache"):
            one.use_cache = False  # the keys and values of all layers would stay in memory

    def choose(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        in_pieces = any(isinstance(leaf, ShardedTensorBase) for leaf in pytree.tree_leaves((args, kwargs)))
        if in_pieces and kwargs.get("attention_mask") is not None:
            raise PlanError(
                "a mask was given beside sequences in pieces: give attention_mask to the plan's cut, as a part of the "
                "batch, which turns it into documents"
            )
        for one, own in chosen:
            one._attn_implementation = IMPLEMENTATION if in_pieces else own

    model.register_forward_pre_hook(choose, with_kwargs=True)
    theirs: Any = getattr(model, "loss_function", None)
    if getattr(theirs, "__name__", "") == "ForCausalLMLoss":
        setattr(model, "loss_function", _position_first(theirs))  # noqa: B010 # a property of transformers' models


def _position_first(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """The loss of a causal language model with tokens in the order of their positions, which no rank must send.

    Sequences one behind another would be cut at other places than each of them is.
    """

    def loss(logits: Any, labels: Any, vocab_size: int, shift_labels: Any = None, **options: Any) -> Any:
        if shift_labels is not None and logits.ndim == 3 and logits.shape[0] > 1:
            logits = logits.transpose(0, 1).flatten(0, 1).unsqueeze(0)
            shift_labels = shift_labels.transpose(0, 1).flatten().unsqueeze(0)
        return theirs(logits=logits, labels=labels, vocab_size=vocab_size, shift_labels=shift_labels, **options)

    loss.__name__ = "ForCausalLMLoss"
    return loss
