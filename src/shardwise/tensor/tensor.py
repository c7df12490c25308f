"""`ShardedTensor`: one tensor whose boxes lie on the ranks of a process group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup, rpc

from shardwise.comm.agreement import in_step
from shardwise.comm.group import Fields, or_default
from shardwise.comm.transfer import Moving
from shardwise.errors import MemoryFormatError, RpcError
from shardwise.layout.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties, restore_properties
from shardwise.layout.specs import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    FixedShardingSpec,
    GridShardingSpec,
    ReplicatedShardingSpec,
    ShardingSpec,
)
from shardwise.tensor import assembly, devices, movement, pickling, remote
from shardwise.tensor.base import ShardedTensorBase
from shardwise.tensor.dispatch import registry
from shardwise.tensor.frame import Frame, Parts
from shardwise.tensor.random import Draw
from shardwise.tensor.shard import Shard
from shardwise.tensor.shorthand import ShardingLike
from shardwise.tensor.transforms import below_transforms
from shardwise.torch_private import DisableTorchFunctionSubclass, TensorBase, is_torch_function_enabled

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


class ShardedTensor(ShardedTensorBase):
    """A tensor whose boxes lie on the ranks of a process group. Every rank makes it with the same arguments.

    `shardwise.shard`, `from_local` and the factories make one; its constructor is `shardwise.empty`. It is a
    `torch.Tensor`: torch's functions take it, with autograd, and every rank of the group calls them::

        >>> w = shardwise.shard(torch.arange(8.0).reshape(4, 2), 0)
        >>> w.shape, w.local_tensor().shape  # of all of it, and of what is here
        (torch.Size([4, 2]), torch.Size([2, 2]))
        >>> (w @ w.T).sum().item()
        400.0
        >>> w.redistribute(1).full_tensor().equal(w.full_tensor())
        True
    """

    @property
    def _process_group(self) -> ProcessGroup:
        group = self._frame.process_group
        assert group is not None, "only a ShardedTensorBase has no group"
        return group

    def __new__(
        cls,
        sharding_spec: ShardingLike,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        process_group: ProcessGroup | None = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """Allocate this rank's shards. Every rank of the group calls it; only a digest travels."""
        options: dict[str, Any] = {"process_group": process_group, "init_rrefs": init_rrefs, "layout": layout}
        options |= {"requires_grad": requires_grad, "pin_memory": pin_memory, "memory_format": memory_format}
        return cls._filled("empty", sharding_spec, size, dtype=dtype, **options)

    @classmethod
    def _filled(
        cls,
        verb: str,
        spec: ShardingLike,
        size: Sequence[Any],
        *,
        fill: assembly.Fill | None = None,
        draw: Draw | None = None,
        generator: torch.Generator | None = None,
        process_group: ProcessGroup | None = None,
        init_rrefs: bool = False,
        dtype: torch.dtype | None = None,
        **properties: Any,
    ) -> ShardedTensor:
        """A new tensor, each shard filled by ``fill``, or all shards by ``draw``; the verb is for errors."""
        asked = TensorProperties(torch.get_default_dtype() if dtype is None else dtype, **properties)
        filling: dict[str, Any] = {"fill": fill, "draw": draw, "generator": generator}
        parts = assembly.allocate(spec, size, asked, process_group, verb=verb, init_rrefs=init_rrefs, **filling)
        return remote.share(cls._wrap(parts)) if init_rrefs else cls._wrap(parts)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """All work is done in `__new__`."""

    @classmethod
    def _init_from_local_shards(
        cls,
        local_shards: list[Shard],
        *global_size: Any,
        process_group: ProcessGroup | None = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """A tensor from every rank's shards. Every rank of the group calls it; the shards' metadata travels.

        A ``None`` in the global size means: work it out, by laying the shards behind each other in that dim in the
        order of the ranks (unless their offsets already fit).
        """
        self = cls._wrap(assembly.from_local_shards(local_shards, global_size, process_group, init_rrefs=init_rrefs))
        return remote.share(self) if init_rrefs else self

    @classmethod
    def _init_from_local_tensor(
        cls,
        local_tensor: torch.Tensor,
        sharding_spec: ShardingSpec,
        *global_size: Any,
        process_group: ProcessGroup | None = None,
        init_rrefs: bool = False,
    ) -> ShardedTensor:
        """A tensor from one local tensor per rank and the spec they follow. Every rank calls it; a digest travels."""
        self = cls._wrap(
            assembly.from_local_tensor(local_tensor, sharding_spec, global_size, process_group, init_rrefs=init_rrefs)
        )
        return remote.share(self) if init_rrefs else self

    @classmethod
    def _init_from_local_shards_and_global_metadata(  # type: ignore[override] # the old system's two signatures
        cls,
        local_shards: list[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        process_group: ProcessGroup | None = None,
        init_rrefs: bool = False,
        sharding_spec: ShardingSpec | None = None,
    ) -> ShardedTensor:
        """A tensor from this rank's shards and metadata that every rank knows. No communication but for references."""
        group = or_default(process_group)

        def work() -> tuple[ShardedTensor, Fields]:
            parts = assembly.from_global_metadata(local_shards, sharded_tensor_metadata, sharding_spec, group)
            return cls._wrap(parts), {"verb": "from metadata, with references"}

        return remote.share(in_step(or_default(None), work)) if init_rrefs else work()[0]

    # Pickles of the old system ----------------------------------------------------------------------------------

    ProcessGroupState = pickling.ProcessGroupState

    def __setstate__(self, state: Any) -> None:
        with DisableTorchFunctionSubclass():  # torch has made a wrapper without parts
            device = TensorBase.device.__get__(self)
            TensorBase.requires_grad.__set__(self, False)  # of the wrapper; the shards have their own
        self._fill(pickling.restore_old(state, device))
        if state[-1]:
            remote.share(self)

    # Moving data ------------------------------------------------------------------------------------------------

    @below_transforms
    def gather(  # type: ignore[override] # the old system's, not torch's
        self,
        dst: int = 0,
        out: torch.Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
        *,
        dim: int | None = None,
        index: torch.Tensor | None = None,
    ) -> Any:
        """Put the whole tensor together in ``out`` on the group's rank ``dst``. Every rank of the group calls it.

        ``out`` has the size of the tensor on that rank, and is None on all others. Each rank sends its shards once,
        straight into ``out`` where they lie contiguously in it. With ``dtype``, values are rounded to that dtype on
        their way; ``enforce_dtype`` is the old name for ``dtype=out.dtype`` and changes nothing.

        With indices in the place of ``out``, ``gather(dim, index)``, or by these names, it is `torch.gather`. Integers
        are taken for indices into a tensor of another dtype. Of a tensor of integers they may be either: there the
        ranks tell each other whether they gave a tensor. All of them give indices, and one of them gives ``out``; a
        group of one rank takes a tensor of the same size for indices, and within `own_batches` for ``out``.
        """
        if index is not None:
            return torch.gather(self, dst if dim is None else dim, index)
        if movement.is_torch_gather(self, out, rounds=enforce_dtype or dtype is not None):
            assert out is not None
            return torch.gather(self, dst, out)
        return movement.gather(self, dst, out, enforce_dtype, dtype)

    @below_transforms
    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, on every rank, as a plain tensor. Every rank of the group calls it.

        Differentiable: what is computed from it is one value, the same on every rank, and so its gradient counts once.
        Within `own_batches` each rank's loss is its own, and their gradients are added up.
        """
        return movement.full_tensor(self)

    def _full_for_op(self) -> torch.Tensor:
        """As `full_tensor`, called by an op."""
        return movement.full_tensor(self, in_op=True)

    @below_transforms
    def redistribute(
        self,
        sharding_spec: ShardingLike,
        dims: Any = None,
        *,
        process_group: ProcessGroup | None = None,
        max_bytes: int | None = None,
        async_op: bool = False,
        relabel: bool = False,
        weights: Sequence[Any] | None = None,
    ) -> Any:
        """A new tensor with the same values in another sharding; exactly what must move is moved.

        It is said as in `shardwise.shard`: a spec, a dim over all ranks, None, or a mesh and a dim for each axis; with
        ``weights`` in proportion. Every rank of the group calls it; with another group, every rank of the default one.
        It is differentiable: the backward moves gradients the other way, and adds up what comes from several replicas.

        ``max_bytes`` bounds the buffers on each rank; the transfer then goes in rounds. ``async_op=True`` begins and
        gives an object whose ``wait()`` gives the tensor; until then this tensor must not be changed, and autograd does
        not record it. ``relabel=True`` exchanges the ranks of the spec among themselves so that the least must move.
        """
        request = movement.Request(sharding_spec, dims, weights, process_group, max_bytes, relabel, async_op)
        if async_op:
            return Pending(self, *movement.begin_redistribution(self, request))
        return self._moved_to(request)

    def _redistributed(self, sharding_spec: ShardingSpec) -> ShardedTensor:
        """As `redistribute`, called by an op: ranks compare as they do in ops."""
        request = movement.Request(sharding_spec, None, None, None, None, relabel=False, async_op=False, in_op=True)
        return self._moved_to(request)

    def _moved_to(self, request: movement.Request) -> ShardedTensor:
        frame, tensors, anchor = movement.redistribute(self, request)
        new: ShardedTensor = self._derived(frame, tensors, anchor)
        return new

    @below_transforms
    def reshard(
        self, resharding_spec: ShardingLike, dims: Any = None, *, weights: Sequence[Any] | None = None
    ) -> ShardedTensor:
        """Change this tensor in place to another sharding, and its gradient with it. Every rank of the group calls it.

        It is said as in `shardwise.shard`: a spec, a dim over all ranks, None, or a mesh and a dim for each axis.
        """
        movement.reshard(self, resharding_spec, dims, weights)
        return self

    def to_dtensor(self, mesh: DeviceMesh, placements: Sequence[Any] | None = None) -> DTensor:
        """The tensor as a DTensor, over the same memory where both lie alike. See `shardwise.to_dtensor`."""
        dtensor: DTensor = registry.verbs["to_dtensor"](self, mesh, placements)
        return dtensor

    @below_transforms
    def to(self, *args: Any, **kwargs: Any) -> ShardedTensor:
        """The tensor on another device or of another dtype, as `torch.Tensor.to`; itself when nothing changes.

        Each rank moves its own shards, to its current device when no index is given. When the device changes, every
        rank of the group calls it, and each learns the others' devices. Takes ``process_group`` for the new tensor.
        """
        if not is_torch_function_enabled():  # inside an op that is decomposed
            return super().to(*args, **kwargs)  # type: ignore[return-value] # sharded
        converted = devices.converted(self, args, kwargs)
        if converted is None:
            return self
        new: ShardedTensor = self._derived(*converted[0])
        new._strides = converted[1]
        return new

    def cpu(
        self, memory_format: torch.memory_format = torch.preserve_format, process_group: ProcessGroup | None = None
    ) -> ShardedTensor:
        """The tensor in CPU memory; itself when it is there. Every rank of the group calls it."""
        _require_plain_format(memory_format)
        return self.to(torch.device("cpu"), process_group=process_group)

    def cuda(
        self,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: ProcessGroup | None = None,
    ) -> ShardedTensor:
        """The tensor in CUDA memory, by default each rank's current device. Every rank of the group calls it."""
        _require_plain_format(memory_format)
        target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        return self.to(target, non_blocking=non_blocking, process_group=process_group)

    def remote_shards(self) -> dict[int, list[rpc.RRef[Shard]]]:
        """For each other RPC rank that holds shards, references to them."""
        if not self._init_rrefs:
            raise RpcError("ShardedTensor created with init_rrefs=False, no RRefs to remote shards available")
        return self._remote_shards or {}


class Pending:
    """A tensor that is being redistributed."""

    def __init__(self, source: ShardedTensor, frame: Frame, moving: Moving | None) -> None:
        self._source, self._frame, self._moving = source, frame, moving

    def wait(self) -> ShardedTensor:
        """Wait for the tensor, and give it."""
        return ShardedTensor._wrap(Parts(self._frame, [] if self._moving is None else self._moving.wait()))


@below_transforms
def shard_tensor(
    tensor: torch.Tensor, sharding_spec: ShardingSpec, src_rank: int = 0, process_group: ProcessGroup | None = None
) -> ShardedTensor:
    """Cut the tensor that the group's rank ``src_rank`` has. Every rank calls it, with a tensor of that size and dtype.

    Only the source's values matter: the others may pass a tensor on the ``meta`` device. It may have any strides; the
    shards are contiguous. Each shard is sent once, to its rank. The shards are leaves, and require grad as the tensor
    does. A spec whose class has a `shard` of its own is asked for the sharded tensor.
    """
    if not isinstance(sharding_spec, ShardingSpec) or type(sharding_spec).shard is ShardingSpec.shard:
        return _scatter(tensor, sharding_spec, src_rank, process_group)
    group = or_default(process_group)

    def work() -> tuple[None, Fields]:
        return None, {"verb": "shard", "src_rank": src_rank, "sharding_spec": type(sharding_spec).__name__}

    in_step(group, work)
    sharded: ShardedTensor = sharding_spec.shard(tensor, src_rank=src_rank, process_group=group)
    return sharded


def _scatter(tensor: torch.Tensor, spec: ShardingSpec, src_rank: int, group: ProcessGroup | None) -> ShardedTensor:
    return ShardedTensor._wrap(movement.scatter(tensor, spec, src_rank, group))


ShardingSpec._scatter = staticmethod(_scatter)


def _show_old_signature(method: Callable[..., Any], *added: str) -> None:
    """Show the old system's signature, without the parameters that were added."""
    full = inspect.signature(method)
    old = [parameter for name, parameter in full.parameters.items() if name not in added]
    inspect.unwrap(method).__signature__ = full.replace(parameters=old)


_show_old_signature(ShardedTensor.gather, "dim", "index")  # torch's two names
_show_old_signature(ShardedTensor.reshard, "dims", "weights")


def _require_plain_format(memory_format: torch.memory_format) -> None:
    if memory_format not in (torch.preserve_format, torch.contiguous_format):
        raise MemoryFormatError("Only `torch.contiguous_format` or `torch.preserve_format` is supported!")


def rebuild_sharded_tensor(state: dict[str, Any]) -> ShardedTensorBase:
    """The function that a pickle calls. With RPC references, every rank of the RPC world must load its own pickle."""
    parts = pickling.restore(state)
    if parts.frame.process_group is None:
        return ShardedTensorBase._wrap(parts)
    self = ShardedTensor._wrap(parts)
    if state["is_param"]:
        self._is_param = True  # torch.nn.Parameter's own mark
    return remote.share(self) if state["init_rrefs"] else self


registry.verbs["rebuild"] = rebuild_sharded_tensor

# With these, `torch.load(..., weights_only=True)` accepts sharded tensors; each checks what it is called with.
torch.serialization.add_safe_globals(
    [
        rebuild_sharded_tensor,
        restore_properties,
        ShardMetadata,
        ChunkShardingSpec,
        EnumerableShardingSpec,
        FixedShardingSpec,
        GridShardingSpec,
        ReplicatedShardingSpec,
    ]
)
