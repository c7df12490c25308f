"""Every exception the library raises by itself.

Each one is a `ShardwiseError` and also the builtin that callers of the old system catch::

    ShardwiseError
    ├── LayoutError(ValueError)             boxes that do not make up a tensor
    │   ├── SizeError(TypeError)            a tensor size that is not a sequence of integers
    │   ├── OverlapError                    two shards hold the same elements
    │   └── GapError                        some elements are in no shard
    ├── SpecError(ValueError)               a sharding spec that cannot be, or cannot cut this size
    │   ├── FrozenSpecError(AttributeError) a spec is a value, and somebody assigns to it
    │   └── NamedDimError(NotImplementedError)
    ├── PlacementError(ValueError, RuntimeError)
    │                                       a placement that names no place
    ├── PropertyError(ValueError)           a local shard that contradicts its metadata
    │   ├── DimRangeError(IndexError)       a dim that the tensor does not have
    │   ├── IdRangeError(IndexError)        an id that is no row of the table
    │   └── MemoryFormatError(RuntimeError) a memory format that sharded tensors do not have
    ├── RankMismatchError(ValueError)       ranks that disagree about one tensor
    │   └── PlainValueError                 a plain operand that is not the same on every rank
    ├── ShardCountError(RuntimeError)       more or fewer local shards than the metadata says
    │   └── LocalTensorError(NotImplementedError)
    │                                       the one local tensor of a rank that has none or several
    ├── ProcessGroupError(RuntimeError)     no process group, or the wrong one
    │   └── RankOrderError(ValueError)      RPC numbers the processes in another order
    ├── TransferError(RuntimeError)         data on its way between ranks was lost
    │   └── StateLostError                  tensors of which only ranks that are gone had parts
    ├── CheckpointError(RuntimeError)       a checkpoint that cannot be written or read
    │   ├── StateMismatchError(ValueError)  a checkpoint that does not hold the state to be loaded
    │   ├── FileGoneError                   a file of it that is not there
    │   └── DamageError                     a checkpoint that is not what was written
    ├── RpcError(RuntimeError)              the RPC framework is missing
    ├── UnsupportedOpError(RuntimeError)    an op that has no rule for sharded tensors
    │   ├── CollectiveOpError               a collective of torch on a sharded tensor
    │   └── NoAttributeError(AttributeError)
    │                                       an attribute of tensors that sharded ones do not have
    ├── ViewWriteError(RuntimeError)        a write that would not reach what it is meant for
    ├── LeafWriteError(RuntimeError)        a recorded write into a leaf that requires grad
    ├── MixedOperandsError(RuntimeError)    a sharded tensor and a DTensor in one op
    ├── SignatureError(TypeError)           an op handler with the wrong signature
    ├── NoDistributedTensorError(TypeError, ValueError)
    │                                       a handler for sharded tensors called without one
    ├── CaptureError(RuntimeError)          a step that cannot be captured as a CUDA graph
    ├── PlanError(ValueError)               a sharding plan that does not fit its module
    │   ├── PlanKindError(TypeError)        a plan, or an entry of one, that is no such thing
    │   ├── PlanNameError(AttributeError)   a name that is not in the module
    │   ├── PlanOverlapError(RuntimeError)  entries that would change the same part of the module
    │   └── PlanRootError(KeyError)         the root, where only a submodule can be swapped
    ├── RecipeError(ValueError)             a recipe that does not make the target's tensors of the source's
    ├── OptimizerError(ValueError)          an optimizer that cannot train these parameters
    │   └── OptimizerStateError             a state dict that is not one of this optimizer
    ├── DeviceError(ValueError)             a device that is unknown, or not fully described
    ├── EstimateError(ValueError)           an estimate that is not possible, or asked for wrongly
    ├── ReportError(ValueError)             figures of a report that do not fit together
    │   └── ReportKindError(TypeError)      something else than an estimate or a trace, to be shown on a page
    └── DropinError(RuntimeError)           the old system cannot be replaced in this process
"""

from __future__ import annotations

import builtins


class ShardwiseError(Exception):
    """Base of every error raised by shardwise, each of which is a builtin error, too: see `shardwise.errors`."""


class LayoutError(ShardwiseError, ValueError):
    """The boxes do not make up a tensor."""


class SizeError(LayoutError, TypeError):
    """A tensor size that is not a sequence of non-negative integers."""


class OverlapError(LayoutError):
    """Two shards hold the same elements."""


class GapError(LayoutError):
    """Some elements of the tensor are in no shard."""


class SpecError(ShardwiseError, ValueError):
    """A sharding spec that cannot be, or that cannot cut a tensor of this size."""


class FrozenSpecError(SpecError, AttributeError):
    """A spec is a value: make another one, as `dataclasses.replace` does."""


class NamedDimError(SpecError, NotImplementedError):
    """A dim given by name."""


class PlacementError(ShardwiseError, ValueError, RuntimeError):
    """A placement that names no place in this job."""


class PropertyError(ShardwiseError, ValueError):
    """A local shard whose tensor contradicts its metadata or its neighbours."""


class DimRangeError(PropertyError, IndexError):
    """A dim that the tensor does not have."""


class IdRangeError(PropertyError, IndexError):
    """An id that is not a row of the table it is looked up in."""


class MemoryFormatError(PropertyError, RuntimeError):
    """A memory format that sharded tensors do not have."""


class RankMismatchError(ShardwiseError, ValueError):
    """The ranks of a group hold different ideas of one tensor."""


class PlainValueError(RankMismatchError):
    """A plain operand that is not the same on every rank."""


class ShardCountError(ShardwiseError, RuntimeError):
    """This rank brought more or fewer shards than the metadata gives it."""


class LocalTensorError(ShardCountError, NotImplementedError):
    """The one local tensor was asked for on a rank that does not hold exactly one shard."""


class ProcessGroupError(ShardwiseError, RuntimeError):
    """There is no process group, or it is not the one that is needed."""


class RankOrderError(ProcessGroupError, ValueError):
    """RPC numbers the processes otherwise than the default process group does."""


class TransferError(ShardwiseError, RuntimeError):
    """Data on its way between ranks was lost, most likely with one of the ranks."""


class StateLostError(TransferError):
    """Tensors of which only ranks that are gone had parts: they are in no memory any more."""


class CheckpointError(ShardwiseError, RuntimeError):
    """A checkpoint that cannot be written or read."""


class StateMismatchError(CheckpointError, ValueError):
    """A checkpoint that is whole, but does not hold the state that is to be loaded."""


class DamageError(CheckpointError):
    """A checkpoint that is there, and is not what was written."""


class FileGoneError(CheckpointError):
    """A file that should be there and is not."""


class RpcError(ShardwiseError, RuntimeError):
    """The RPC framework is needed and not initialised."""


class UnsupportedOpError(ShardwiseError, RuntimeError):
    """An op that has no rule for sharded tensors."""

    reason = ""  # why, in a few words


class CollectiveOpError(UnsupportedOpError):
    """A collective of torch on a tensor whose data is on all ranks already."""


class NoAttributeError(UnsupportedOpError, AttributeError):
    """An attribute of tensors that sharded tensors do not have."""


class ViewWriteError(ShardwiseError, RuntimeError):
    """A write into a tensor that would not reach, on every rank, what it is meant for."""


class LeafWriteError(ShardwiseError, RuntimeError):
    """A write into a leaf that requires grad, or into a view of one, while autograd records: as torch refuses it."""


class MixedOperandsError(ShardwiseError, RuntimeError):
    """A sharded tensor and a DTensor in one op. Not a TypeError: torch's operators would swallow that."""


class SignatureError(ShardwiseError, TypeError):
    """An op handler that cannot be called as handlers are called."""


class NoDistributedTensorError(ShardwiseError, TypeError, ValueError):
    """A handler for sharded tensors was called without one."""


class CaptureError(ShardwiseError, RuntimeError):
    """A step that cannot be captured as a CUDA graph, or is called otherwise than it was captured."""


class PlanError(ShardwiseError, ValueError):
    """A sharding plan that does not fit its module; ``problems`` has a line for each thing that is wrong."""

    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        return Exception.__str__(self)  # a KeyError's would quote it


class PlanKindError(PlanError, TypeError):
    """A plan, or an entry of one, that is neither a spec nor whatever else is wanted there."""


class PlanNameError(PlanError, AttributeError):
    """A name or pattern that names nothing in the module."""


class PlanOverlapError(PlanError, RuntimeError):
    """Entries of a plan that would change the same part of the module."""


class PlanRootError(PlanError, KeyError):
    """The module itself was named, which has no parent to swap it in."""


class RecipeError(ShardwiseError, ValueError):
    """A recipe that does not make the target's tensors of the source's; ``problems`` has a line for each problem."""

    problems: tuple[str, ...] = ()


class OptimizerError(ShardwiseError, ValueError):
    """An optimizer that cannot train these parameters."""


class OptimizerStateError(OptimizerError):
    """A state dict whose entries are not those of this optimizer."""


class DeviceError(ShardwiseError, ValueError):
    """A device that is unknown, or whose description lacks something."""


class EstimateError(ShardwiseError, ValueError):
    """An estimate of a step that cannot be made, or that is asked for wrongly."""


class ReportError(ShardwiseError, ValueError):
    """Figures of a report that do not fit together, such as a series with fewer values than times."""


class ReportKindError(ReportError, TypeError):
    """Something else than an estimate or a trace, to be shown on a page."""


class DropinError(ShardwiseError, RuntimeError):
    """`torch.distributed._shard` cannot be replaced in this process."""


def same_kind(type_name: str, message: str) -> Exception:
    """Make the exception that another rank raised: ours or a builtin by its name, else a RuntimeError."""
    kind = globals().get(type_name) or getattr(builtins, type_name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RuntimeError(f"{type_name}: {message}")
    try:
        return kind(message)
    except TypeError:  # a builtin such as UnicodeDecodeError wants more than a message
        return RuntimeError(f"{type_name}: {message}")


def plan_error(problems: list[tuple[str, str]]) -> Exception:
    """The error for what is wrong with a plan, given as kinds and messages.

    A single problem is an error of its own kind. Several make one `PlanError` that lists them, and that is also of each
    builtin kind among them, so that whoever waits for one of them catches it.
    """
    if len(problems) == 1:
        return same_kind(*problems[0])
    kinds = [type(same_kind(*problem)) for problem in problems]
    builtin = {base for kind in kinds for base in kind.__mro__ if base.__module__ == "builtins"}
    leaves = [kind for kind in builtin if not any(other is not kind and issubclass(other, kind) for other in builtin)]
    lines = tuple(message for _, message in problems)
    bases = (PlanError, *sorted(leaves, key=lambda kind: kind.__name__))
    members = {"__doc__": PlanError.__doc__, "__reduce__": lambda self: (plan_error, (problems,))}
    try:
        several: type[PlanError] = type("PlanError", bases, members)
    except TypeError:  # builtins that hold different things do not go together
        several = PlanError
    error = several(f"{len(lines)} things are wrong with the sharding plan:\n  - " + "\n  - ".join(lines))
    error.problems = lines
    return error


def recipe_error(problems: list[str]) -> RecipeError:
    """The error for what is wrong with a recipe, all in one."""
    many = f"{len(problems)} things are wrong with the recipe:\n  - " + "\n  - ".join(problems)
    error = RecipeError(problems[0] if len(problems) == 1 else many)
    error.problems = tuple(problems)
    return error
