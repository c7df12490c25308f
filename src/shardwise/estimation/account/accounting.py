"""`Accounting`: torch's fake tensors, of which memory, arithmetic and time are noted for one rank.

All is computed on fake tensors of the CPU, whatever device they stand for: the sizes are the same, and no such device
has to be there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardwise.estimation.account.forecast import Forecast
from shardwise.estimation.account.gpu_kernels import scratch_of
from shardwise.estimation.account.kernels import bytes_of, flops_of, op_of
from shardwise.estimation.account.ledger import (
    ACTIVATIONS,
    BACKWARD,
    BEFORE,
    FORWARD,
    GATHERED,
    GRADIENTS,
    OTHER,
    PARAMETERS,
    STATES,
    STEP,
    TEMPORARIES,
    TRANSFERS,
    Ledger,
)
from shardwise.estimation.account.result_cache import MISSING, ResultCache
from shardwise.estimation.account.tape import Kernel, Tape
from shardwise.estimation.devices.device import Device
from shardwise.layout import Layout
from shardwise.ops.engine.program import tensors_in
from shardwise.tensor import ShardedTensorBase
from shardwise.torch_private import FakeTensor, FakeTensorMode, current_backward

CPU, META = torch.device("cpu"), torch.device("meta")
DEVICE_OF = torch.ops.prim.device.default
VIEW = 1.0  # what a view takes of the host's time, in calls of an op
Storage = Any  # torch.UntypedStorage


class Accounting(FakeTensorMode):  # type: ignore[no-untyped-call] # torch's
    """A mode in which tensors have no data, and in which it is noted what is allocated, freed and computed."""

    def __init__(self, device: Device) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.tape, self._is_gpu = Tape(), device.kind != "cpu"
        self.ledger = Ledger(device.block)
        self.trace = Forecast(device, self.tape, self._is_buffer)
        self.positions: list[int] = []  # for each event of the ledger, how long the tape was
        self._known: dict[int, _Storage] = {}  # by torch's number of the storage
        self._parameters: dict[int, torch.Tensor] = {}
        self._results, self._is_resolving = ResultCache(self), False
        self._phase = FORWARD
        self.settles = False  # whether nobody will read the account of the step
        self.models: dict[int, torch.nn.Module] = {}  # those that were called, and not by another one
        self.layouts: dict[bytes, Layout] = {}  # of arguments of modules

    # What is told ----------------------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by a torch that keeps compilers out of modes, which takes time at each op: nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An op on fake tensors."""
        if func is DEVICE_OF and args[0].__class__ is FakeTensor:  # asked for several times in each op
            return META if self.in_kernel_invocation else args[0].fake_device
        kwargs = dict(kwargs or {})
        if "device" in kwargs and kwargs["device"] is not None:
            kwargs["device"] = _on_host(kwargs["device"])
        if func.namespace == "prim" or self._is_resolving or self.in_kernel_invocation:
            return super().__torch_dispatch__(func, types, args, kwargs)
        tensors: list[torch.Tensor] = []
        key = self._results.key(func, args, kwargs, tensors)
        out = MISSING if key is None else self._results.result(key, tensors)
        if out is MISSING:
            self._is_resolving = True  # ops by which torch finds the size of a result are none of the step
            try:
                out = super().__torch_dispatch__(func, types, args, kwargs)
            finally:
                self._is_resolving = False
            if key is not None:
                self._results.keep(key, tensors, out)
        self._note(func, args, kwargs, out, None if key is None else tensors)
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any, given: list[torch.Tensor] | None) -> None:
        """An op was called; all tensors among its arguments, if known, have no data and are not on meta."""
        op, results = op_of(func), tensors_in(out)
        outs = [one for one in results if not _is_meta(one)]
        if not outs and not op.is_mutable:
            return
        arguments = tensors_in((*args, *kwargs.values())) if given is None else given
        if given is None:
            given = [one for one in arguments if not _is_meta(one)]
        for tensor in given:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._allocate(storage, BEFORE, "", "", OTHER)
        new = [one for one in map(torch.Tensor.untyped_storage, outs) if one._cdata not in self._known]
        if self.settles and not new:
            return
        module, line = self._where()
        for storage in new:
            if storage._cdata not in self._known:  # several results may share it
                phase, category = self._phase_now()
                self._allocate(storage, phase, module, line, category)
        if self.settles:
            return
        if not new and not op.is_mutable:  # a view
            self.tape.entries.append(Kernel(op.name, module, line, VIEW))
            return
        if self._is_gpu:
            self._note_scratch(op.name, args, out, module, line)
        flops, size = flops_of(op, args, kwargs, out), bytes_of(op, arguments, results)
        dtype = str(given[0].dtype).removeprefix("torch.") if flops else ""
        self.tape.entries.append(
            Kernel(op.name, module, line, 1.0, flops, size, dtype, op.is_attention, self._phase == STEP)
        )

    def _note_scratch(self, name: str, args: Any, out: Any, module: str, line: str) -> None:
        """Memory that a kernel has while it runs."""
        size = scratch_of(name, args, out)
        if size:
            phase = self._phase_now()[0]
            self.positions += [len(self.tape.entries)] * 2
            block = self.ledger.allocate(size, phase, module, line, TEMPORARIES)
            self.ledger.free(block, len(self.ledger.blocks) - 1, phase)

    def _where(self) -> tuple[str, str]:
        """The module and the line that an op is of, also of a backward."""
        origin = self.trace.here()
        return origin.module, origin.place

    def _phase_now(self) -> tuple[str, str]:
        """The phase, and the category if the phase tells it."""
        if self._phase == STEP:
            return STEP, ""
        if current_backward() == -1:
            return FORWARD, ""
        return BACKWARD, ACTIVATIONS if torch.is_grad_enabled() else ""  # recomputed, behind a checkpoint

    # Memory ----------------------------------------------------------------------------------------------------------

    def _allocate(self, storage: Storage, phase: str, module: str, line: str, category: str) -> None:
        key = storage._cdata
        known = _Storage(key, self._forget)
        known.reference = weakref.ref(storage, known.gone)
        self._known[key] = known
        self._fill(known, storage.nbytes(), phase, module, line, category)

    def _fill(self, known: _Storage, size: int, phase: str, module: str, line: str, category: str) -> None:
        self.positions.append(len(self.tape.entries))
        known.number = len(self.ledger.blocks)
        known.block = self.ledger.allocate(size, phase, module, line, category)

    def _forget(self, known: _Storage) -> None:
        self._empty(known)
        if self._known.get(known.key) is known:
            del self._known[known.key]

    def _empty(self, known: _Storage) -> None:
        if known.block is not None and known.block.died is None:
            self.positions.append(len(self.tape.entries))
            phase = BACKWARD if current_backward() != -1 else self._phase
            self.ledger.free(known.block, known.number, phase)

    def _resized(self, storage: Storage) -> None:
        """A storage has more or less memory now: flat memory that is gathered, or given back."""
        known = self._known.get(storage._cdata)
        if known is None:
            return
        self._empty(known)
        if storage.nbytes():
            module, line = self._where()
            self._fill(known, storage.nbytes(), self._phase_now()[0], module, line, GATHERED)

    def _is_buffer(self, tensor: torch.Tensor) -> None:
        self._mark(tensor, TRANSFERS)

    def _mark(self, tensor: Any, category: str) -> None:
        """Say what the memory of a tensor is for, unless that is known."""
        for local in _locals(tensor):
            if _is_meta(local):
                continue
            storage = local.untyped_storage()
            known = self._known.get(storage._cdata)
            if known is None:
                self._allocate(storage, BEFORE, "", "", category)
            elif known.block is not None and known.block.category in ("", OTHER, TRANSFERS):  # a sum becomes one
                known.block.category = category

    def _mark_gradients(self) -> None:
        """The gradients of all parameters that were seen."""
        for parameter in self._parameters.values():
            grad = parameter.grad
            if grad is not None:
                self._mark(grad, GRADIENTS)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Those that were seen."""
        return list(self._parameters.values())

    def _see(self, parameter: Any) -> None:
        self._parameters[id(parameter)] = parameter
        self._mark(parameter, PARAMETERS)

    # The course of a step --------------------------------------------------------------------------------------------

    def begin_step(self, *, settles: bool = False) -> None:
        """From now on, a new account: what is there was there before.

        If the step only settles down, nobody will read its account: only memory is noted, for what stays of it.
        """
        self.end_step()
        self.settles = settles
        self.ledger, self.tape, self.positions = Ledger(self.ledger.granularity), Tape(), []
        self.trace.restart(self.tape)
        for known in list(self._known.values()):
            block = known.block
            if block is not None and block.died is None:
                self._fill(known, block.bytes, BEFORE, block.module, block.line, block.category or OTHER)
            else:
                known.block = None
        self.ledger.start = self.ledger.now

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """Within this context, a step is set up: what that sends is not noted."""
        self.trace.is_setting_up = True
        try:
            yield
        finally:
            self.trace.is_setting_up = False

    def end_step(self) -> None:
        """The step is over: what is looked at from now on is no part of it."""
        self.trace.tape = Tape()
        self._mark_gradients()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within this context, phases of a step, parameters and storages that change their size are told."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: Storage, size: int) -> Any:
            found = resize(storage, size)
            self._resized(storage)
            return found

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._mark_gradients()
            self._phase = STEP

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._phase = FORWARD
            for tensor in _tensors_of(optimizer.state.values()):
                self._mark(tensor, STATES)

        def before_forward(module: torch.nn.Module, args: Any) -> None:
            if not self.trace.is_in_module() and current_backward() == -1:  # else it is recomputed
                self.models[id(module)] = module
                for parameter in module.parameters():  # before any is replaced by a view of gathered memory
                    self._see(parameter)
            for tensor in tensors_in(args):
                if isinstance(tensor, ShardedTensorBase):
                    self.layouts[tensor._layout.digest] = tensor._layout

        with ExitStack() as stack:
            first = register_optimizer_step_pre_hook(before_step)
            hooks: Any = first.hooks_dict_ref()
            hooks.move_to_end(first.id, last=False)  # another hook takes steps itself
            for handle in (
                first,
                register_optimizer_step_post_hook(after_step),
                register_module_forward_pre_hook(before_forward),
            ):
                stack.callback(handle.remove)
            torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment] # which no dispatch shows
            stack.callback(setattr, torch.UntypedStorage, "resize_", resize)
            yield


class _Storage:
    """A storage that is known, and its block of memory; it has none between uses."""

    def __init__(self, key: int, forget: Callable[[_Storage], None]) -> None:
        self.key, self._forget = key, forget
        self.block: Any = None
        self.number = -1
        self.reference: Any = None

    def gone(self, _: object) -> None:
        """Torch has freed the storage."""
        self._forget(self)


def _is_meta(tensor: torch.Tensor) -> bool:
    """The same as ``is_meta``, which would dispatch an op where the tensor is a fake one."""
    found: torch.device = tensor.fake_device if tensor.__class__ is FakeTensor else tensor.device
    return found == META


def _on_host(device: Any) -> Any:
    return device if torch.device(device).type == "meta" else CPU


def _locals(tensor: Any) -> Iterable[torch.Tensor]:
    return tensor._local_tensors() if isinstance(tensor, ShardedTensorBase) else (tensor,)


def _tensors_of(nest: Any) -> Iterator[torch.Tensor]:
    """All tensors in the state of an optimizer."""
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, dict):
        yield from _tensors_of(nest.values())
    elif not isinstance(nest, str | bytes) and isinstance(nest, Iterable):
        for one in nest:
            yield from _tensors_of(one)
