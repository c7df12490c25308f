"""Every private name of torch that shardwise uses, with its purpose: what may break with the next torch.

Other files import these names from here. The names are checked on import: a torch without one of them fails with one
message that lists all missing names. `LATER` lists the names of modules that `import torch` does not load;
`load_private` checks each on its first use. Attributes of torch's objects, and variables that torch changes, are listed
here too, but read where they are used. `shardwise/patching.py` lists what shardwise replaces.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.rpc

NAMES: dict[str, str] = {}  # private name of torch → its purpose
_missing: list[str] = []


def _find(path: str) -> Any:
    """The object of a dotted path, or the annotation of an attribute that instances have; None if there is none."""
    name, _, rest = path.partition(".")
    found: Any = importlib.import_module(name)
    for part in rest.split("."):
        name = f"{name}.{part}"  # of a module that its package may have deleted, or of something in one
        found = getattr(found, part, getattr(found, "__annotations__", {}).get(part, sys.modules.get(name)))
    return found


def _private(path: str, purpose: str) -> Any:
    """The object of this name, which must exist."""
    NAMES[path] = purpose
    found = _find(path)
    if found is None:
        _missing.append(path)
    return found


def _error(missing: Sequence[str]) -> ImportError:
    listed = "".join(f"\n  {path}: {NAMES[path]}" for path in missing)
    return ImportError(
        f"shardwise uses private names of torch that torch {torch.__version__} does not have; "
        f"shardwise is made for torch 2.11 to 2.13:{listed}"
    )


# Tensor subclasses and __torch_function__ ----------------------------------------------------------------------------

make_wrapper_subclass = _private("torch.Tensor._make_wrapper_subclass", "create tensors with a size and without memory")
TensorBase = _private("torch._C.TensorBase", "read attributes of a wrapper without __torch_function__")
DisableTorchFunction = _private("torch._C.DisableTorchFunction", "call torch without __torch_function__ and modes")
DisableTorchFunctionSubclass = _private(
    "torch._C.DisableTorchFunctionSubclass", "call torch without __torch_function__, but with modes"
)
EnableTorchFunction = _private(
    "torch._C._EnableTorchFunction", "dispatch the ops of a decomposition to sharded tensors again"
)
is_torch_function_enabled = _private("torch._C._is_torch_function_enabled", "tell whether an op is being decomposed")
is_torch_function_mode_enabled = _private(
    "torch._C._is_torch_function_mode_enabled", "bypass the cache of calls while a mode watches"
)
has_global_module_hooks = _private(
    "torch.nn.modules.module._has_any_global_hook", "run units as they are while somebody watches all modules"
)
torch_function_mode_count = _private("torch._C._len_torch_function_stack", "find the modes that are active")
torch_function_mode_at = _private("torch._C._get_function_stack_at", "find the modes that are active")
variable_functions = _private("torch._C._VariableFunctions", "tell functions that call one aten op")
nn_functions = _private("torch._C._nn", "tell functions that call one aten op")
parse_to = _private("torch._C._nn._parse_to", "parse the arguments of Tensor.to as torch does")

# The dispatcher and aten ---------------------------------------------------------------------------------------------

DispatchKey = _private("torch._C.DispatchKey", "decompose a composite op into its aten ops")
DispatchKeySet = _private("torch._C.DispatchKeySet", "decompose a composite op into its aten ops")
ExcludeDispatchKeyGuard = _private("torch._C._ExcludeDispatchKeyGuard", "run a cached program without autocast")
ForceDispatchKeyGuard = _private(
    "torch._C._ForceDispatchKeyGuard", "restore the caller's dispatch keys inside a decomposition"
)
included_dispatch_keys = _private("torch._C._dispatch_tls_local_include_set", "save the caller's dispatch keys")
excluded_dispatch_keys = _private("torch._C._dispatch_tls_local_exclude_set", "save the caller's dispatch keys")
has_kernel_for = _private(
    "torch._C._dispatch_has_kernel_for_dispatch_key", "tell whether autocast casts the arguments of an op"
)
all_op_names = _private("torch._C._dispatch_get_all_op_names", "find all aten ops that are pointwise")
operation_overload = _private("torch._C._get_operation_overload", "read the tags of an op without loading the op")
dispatch_mode_count = _private("torch._C._len_torch_dispatch_stack", "bypass the cache of calls while a mode watches")
without_dispatch_modes = _private(
    "torch.utils._python_dispatch._disable_current_modes", "compute sizes of results unseen by a compiler"
)
torch_c = _private("torch._C", "run steps without data under no_grad where they ask for inference mode")
_private("torch._C._InferenceMode", "run steps without data under no_grad where they ask for inference mode")
dispatch_mode = _private("torch._C._get_dispatch_mode", "tell whether FakeTensorMode is active")
FAKE_MODE = _private("torch._C._TorchDispatchModeKey.FAKE", "tell whether FakeTensorMode is active")
pre_dispatch_mode = _private("torch._ops._get_dispatch_mode_pre_dispatch", "refuse tracers that see no layouts")
PROXY_MODE = _private("torch._C._TorchDispatchModeKey.PROXY", "refuse tracers that see no layouts")
is_jit_tracing = _private("torch._C._is_tracing", "refuse tracers that see no layouts")
is_key_included = _private("torch._C._dispatch_tls_is_dispatch_key_included", "refuse tracers that see no layouts")
PRE_DISPATCH = _private("torch._C.DispatchKey.PreDispatch", "refuse tracers that see no layouts")
OpOverload = _private("torch._ops.OpOverload", "tell aten ops from functions")
decomposition_table = _private("torch._decomp.decomposition_table", "decompose aten ops that have no rule")
if TYPE_CHECKING:
    import torch.utils._pytree

    pytree = torch.utils._pytree
else:
    pytree = _private("torch.utils._pytree", "find tensors in nested arguments and results")
gpu_sleep = _private("torch.cuda._sleep", "time kernels of a GPU that waits until the host has queued them")
amp_unscale = _private("torch._amp_foreach_non_finite_check_and_unscale_", "unscale gradients for GradScaler")
assert_in_graph = _private("torch._assert_async", "raise for wrong values when a graph runs")
standard_gamma = _private("torch._standard_gamma", "draw from gamma distributions")
for _op, _purpose in {
    "_batch_norm_with_update": "compute batch statistics over all ranks",
    "_cdist_forward": "compute distances over columns that are cut",
    "_embedding_bag": "look up bags of a sharded table",
    "_embedding_bag_forward_only": "look up bags of a sharded table",
    "_fft_c2c": "transform one dim after another",
    "_fft_c2r": "transform one dim after another",
    "_fft_r2c": "transform one dim after another",
    "_grouped_mm": "multiply groups of rows",
    "_histogramdd_bin_edges": "count points in boxes",
    "_histogramdd_from_bin_cts": "count points in boxes",
    "_histogramdd_from_bin_tensors": "count points in boxes",
    "_linalg_check_errors": "raise errors of linear algebra on every rank",
    "_linalg_solve_ex": "solve batches of systems",
    "_local_scalar_dense": "read a value that every rank knows",
    "_native_batch_norm_legit": "compute batch statistics over all ranks",
    "_native_batch_norm_legit_no_training": "normalise by running statistics",
    "_pack_padded_sequence": "run recurrent modules on packed sequences",
    "_pad_packed_sequence": "run recurrent modules on packed sequences",
    "_pdist_forward": "compute distances between rows",
    "_reshape_copy": "reshape as torch's decompositions do",
    "_sample_dirichlet": "draw from Dirichlet distributions",
    "_scaled_dot_product_attention_math": "compute attention without a fused kernel",
    "_scaled_dot_product_efficient_attention": "compute blocks of attention over a sequence in pieces",
    "_scaled_dot_product_efficient_attention_backward": "compute blocks of attention over a sequence in pieces",
    "_scaled_dot_product_flash_attention": "compute blocks of attention over a sequence in pieces",
    "_scaled_dot_product_flash_attention_backward": "compute blocks of attention over a sequence in pieces",
    "_scaled_dot_product_flash_attention_for_cpu": "compute blocks of attention over a sequence in pieces",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "compute blocks of attention over a sequence in pieces",
    "_standard_gamma": "draw from gamma distributions",
    "_unique2": "find distinct elements",
    "_unsafe_index": "index as torch's decompositions do",
    "_unsafe_masked_index": "index as torch's decompositions do",
    "_unsafe_masked_index_put_accumulate": "index as torch's decompositions do",
    "_unsafe_view": "view as torch's decompositions do",
}.items():
    _private(f"torch.ops.aten.{_op}", _purpose)

foreach_norm = _private("torch._foreach_norm", "compute the norms of many gradients")
optimizer_foreach_types = _private(
    "torch.optim.optimizer._foreach_supported_types", "let optimizers step lists of sharded tensors"
)
_private("torch.optim.optimizer._get_foreach_kernels_supported_devices", "estimate optimizers that step lists on a GPU")
clipping_foreach_types = _private(
    "torch.utils._foreach_utils._foreach_supported_types", "let clip_grad_norm_ take lists of sharded tensors"
)
correct_fan = _private("torch.nn.init._calculate_correct_fan", "initialise by the fans of the whole tensor")
JITERATOR = torch._C, "_cuda_jiterator_compile_and_launch_kernel"  # only builds with CUDA have it
jiterator_launch: Any = getattr(*JITERATOR, None)

# Flags that functions read before they choose their ops --------------------------------------------------------------

is_any_autocast_enabled = _private("torch._C._is_any_autocast_enabled", "key of the cache of calls")
uses_deterministic_algorithms = _private("torch._C._get_deterministic_algorithms", "key of the cache of calls")
fills_uninitialized_memory = _private(
    "torch._C._get_deterministic_fill_uninitialized_memory", "key of the cache of calls"
)
is_cudnn_enabled = _private("torch._C._get_cudnn_enabled", "key of the cache of calls")
is_mkldnn_enabled = _private("torch._C._get_mkldnn_enabled", "key of the cache of calls")

# Autograd ------------------------------------------------------------------------------------------------------------

current_backward = _private("torch._C._current_graph_task_id", "tell backwards apart; -1 outside of any")
current_node = _private("torch._C._current_autograd_node", "tell which forward op a gradient's transfer belongs to")
next_node_number = _private("torch._C._autograd._get_sequence_nr", "tell which op made a node")
will_run_node = _private("torch._C._will_engine_execute_node", "tell whether a backward reaches a leaf")
saved_tensor_hooks = _private(
    "torch._C._autograd._top_saved_tensors_default_hooks", "pack saved tensors on ranks without shards too"
)
backward_engine = _private("torch.autograd.Variable._execution_engine", "queue one callback for the end of a backward")
run_backward = _private("torch.autograd.graph._engine_run_backward", "find the user's line that began a backward")
MultiHandle = _private("torch.autograd.graph._MultiHandle", "give the handle that register_multi_grad_hook gives")
StopRecomputation = _private(
    "torch.utils.checkpoint._StopRecomputationError", "pass on the signal that ends a recomputation"
)
functorch_level = _private("torch._C._functorch.maybe_current_level", "tell whether torch.func transforms are active")
is_functorch_tensor = _private("torch._C._functorch.is_functorch_wrapped_tensor", "find the tensor in a transform's")
without_functorch = _private(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", "run collectives outside of transforms"
)
is_thread_local = _private("torch._C._is_key_in_tls", "pass settings on to the threads of a backward")
get_thread_local = _private("torch._C._get_obj_in_tls", "pass settings on to the threads of a backward")
set_thread_local = _private("torch._C._stash_obj_in_tls", "pass settings on to the threads of a backward")

# Fake tensors --------------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    FakeTensor = _private("torch._subclasses.fake_tensor.FakeTensor", "plan without values")
    TorchDispatchMode = _private("torch.utils._python_dispatch.TorchDispatchMode", "count the ops of a step")
    FakeTensorMode = _private("torch._subclasses.fake_tensor.FakeTensorMode", "explain a call without running it")
FAKE_TENSOR_ERRORS: tuple[type[Exception], ...] = (
    _private("torch._subclasses.fake_tensor.DataDependentOutputException", "explain calls that read values"),
    _private("torch._subclasses.fake_tensor.DynamicOutputShapeException", "explain calls that read values"),
    _private("torch._subclasses.fake_tensor.UnsupportedFakeTensorException", "explain calls that fake tensors refuse"),
)
make_subclass = _private("torch.Tensor._make_subclass", "make fake tensors whose sizes are known")
refuse_data_access = _private("torch._C._set_throw_on_mutable_data_ptr", "make fake tensors whose sizes are known")
unset_fake_mode = _private(
    "torch._subclasses.fake_tensor.unset_fake_temporarily", "create real messages in a fake mode"
)

# Process groups and RPC ----------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from torch.distributed.remote_device import _remote_device

    RemoteDevice = _remote_device
else:
    RemoteDevice = _private("torch.distributed.remote_device._remote_device", "placements, as torch's specs have them")
if torch.distributed.rpc.is_available():
    has_rpc_agent = _private("torch.distributed.rpc._is_current_rpc_agent_set", "list the workers of RPC")
    rpc_agent = _private("torch.distributed.rpc._get_current_rpc_agent", "list the workers of RPC")
    rpc_all_gather = _private("torch.distributed.rpc.api._all_gather", "exchange references to remote shards")

resolve_process_group = _private(
    "torch.distributed.distributed_c10d._resolve_process_group", "tell whether torch knows a group by its name"
)
register_process_group = _private(
    "torch.distributed.distributed_c10d._register_process_group", "keep the names of groups after an estimate"
)

# What other files read on torch's objects ----------------------------------------------------------------------------

for _path, _purpose in {
    "torch.Tensor._version": "tell whether a tensor was written to",
    "torch.Tensor._base": "find the tensor that a view belongs to",
    "torch.Tensor._is_view": "find the tensor that a view belongs to",
    "torch.Tensor._is_zerotensor": "materialise gradients that autograd left without memory",
    "torch.Tensor._backward_hooks": "tell whether a leaf has hooks",
    "torch.Tensor._post_accumulate_grad_hooks": "tell whether a leaf has hooks",
    "torch.Tensor._values": "unscale sparse gradients, which need not be coalesced",
    "torch.UntypedStorage._cdata": "tell storages apart",
    "torch.autograd.graph.Node._sequence_nr": "tell which op made a node",
    "torch.autograd.Function._backward_cls": "watch what the context of a custom Function saves",
    "torch.autograd.Function._backward_cls._forward_cls": "let compiled graphs have several backwards",
    "torch.ops.aten.add.Tensor._schema": "find the arguments and results of an op",
    "torch.ops.aten.add.Tensor._overloadpacket": "tell which op a call of an estimate is, whatever its overload",
    "torch.ops.aten.add.Tensor._can_decompose": "decompose a composite op into its aten ops",
    "torch.autograd.forward_ad._current_level": "refuse forward-mode differentiation",
    "torch.distributed.distributed_c10d._world": "find the store of a group, and all groups to end",
    "torch.compiler._is_compiling_flag": "tell models that they are traced",
    "torch.nn.Module._apply": "convert modules of tensors without data, which have weak references",
    "torch.nn.Module._parameters": "replace parameters by sharded ones",
    "torch.nn.Module._forward_hooks": "tell whether somebody watches a module within a fully sharded unit",
    "torch.nn.Module._forward_pre_hooks": "tell whether somebody watches a module within a fully sharded unit",
    "torch.nn.Module._backward_hooks": "tell whether somebody watches a module within a fully sharded unit",
    "torch.nn.Module._backward_pre_hooks": "tell whether somebody watches a module within a fully sharded unit",
    "torch.nn.Module._buffers": "replace buffers by sharded ones",
    "torch.nn.Module._non_persistent_buffers_set": "keep buffers out of state dicts, as before sharding",
    "torch.optim.Optimizer._optimizer_step_pre_hooks": "leave steps with hooks to torch",
    "torch.optim.Optimizer._optimizer_step_post_hooks": "leave steps with hooks to torch",
    "torch.optim.Optimizer._optimizer_state_dict_pre_hooks": "call the hooks of a ShardedOptimizer",
    "torch.optim.Optimizer._optimizer_state_dict_post_hooks": "call the hooks of a ShardedOptimizer",
    "torch.optim.Optimizer._optimizer_load_state_dict_pre_hooks": "call the hooks of a ShardedOptimizer",
    "torch.optim.Optimizer._optimizer_load_state_dict_post_hooks": "call the hooks of a ShardedOptimizer",
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh": "find the rows of a mesh that are parallel to a plan's",
    "torch.distributed.ProcessGroup._start_coalescing": "exchange messages of two jobs by NCCL in one batch",
    "torch.distributed.ProcessGroup._end_coalescing": "exchange messages of two jobs by NCCL in one batch",
    "torch.distributed.ProcessGroup._device_types": "tell which devices a group serves",
    "torch.distributed.ProcessGroup._get_backend": "find the backends of a group, and their timeouts",
}.items():
    _private(_path, _purpose)

# Names of modules that `import torch` does not load ------------------------------------------------------------------

LATER: dict[str, str] = {
    "torch.distributed._functional_collectives.AsyncCollectiveTensor": "wait for the collective of a DTensor",
    "torch.distributed.tensor.placement_types._StridedShard": "convert DTensors that FSDP2 and TP cut together",
    "torch.distributed.tensor.debug._clear_sharding_prop_cache": "free DTensor's caches between tests",
    "torch.distributed.checkpoint.filesystem._StorageInfo": "write the index of torch's checkpoints",
    "torch.distributed.fsdp._common_utils._FSDPState._ignored_params": "refuse sharded parameters in FSDP1",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._unsharded_param": "leave FSDP2's gradients to FSDP2",
    "torch._dynamo.symbolic_convert.break_graph_if_unsupported": "let a graph end at an operator on a sharded tensor",
    "torch.distributed.checkpoint._traverse.set_element": "flatten state dicts for the drop-in",
    "torch.distributed.checkpoint._traverse.traverse_state_dict": "flatten state dicts for the drop-in",
    "torch._dynamo.backends.registry.lookup_backend": "compile graphs by the backends of torch.compile",
    "torch._inductor.config": "keep the order of ops in compiled graphs",
    "torch._inductor.list_mode_options": "compile graphs by the backends of torch.compile",
    "torch._dynamo.eval_frame.reset_code": "free what was compiled for a model that is gone",
    "torch._dynamo.eval_frame._stance": "run full graphs uncompiled where the stance of torch.compiler says so",
    "torch.utils._device.DeviceContext": "tell a default device from other modes",
    "torch._functorch.config": "compile graphs whose backward may run again",
    "torch._guards.tracing": "compile graphs of local tensors",
    "torch._guards.TracingContext": "compile graphs of local tensors",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv": "compile graphs of local tensors",
    "torch.fx.experimental.symbolic_shapes.DimDynamic": "compile graphs for many sizes",
    "torch._dynamo.source.ConstantSource": "compile graphs for many sizes",
    "torch._inductor.compile_fx.compile_fx_inner": "compile graphs for many sizes",
    "torch._inductor.virtualized.V": "compile graphs for many sizes",
}


def load_private(path: str) -> Any:
    """The object of a name in `LATER`, whose module is imported now."""
    NAMES[path] = LATER[path]
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name, None)
    if found is None:
        raise _error([path])
    return found


if _missing:
    raise _error(_missing)
