"""Traces one forward of the whole model, to collect what the partition needs (paper, appendix C.1)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from shardwright.data_parallel import sync_batch_norm
from shardwright.errors import PartitionError, ShardwrightError
from shardwright.partition.audit import Audit
from shardwright.partition.backward_hooks import join_hooks
from shardwright.partition.decision import JoinReason
from shardwright.partition.foreign import ForeignTensors
from shardwright.partition.gpu_fallback import runner_for
from shardwright.partition.measure import MIN_OPERATIONS, DistinctStorages, Measurement, Pieces, evened, repeated
from shardwright.partition.observe import Clock, Execution, OperationMode, Runner, Stack, intercepted, tensors_in
from shardwright.partition.operations import count as operation_count
from shardwright.partition.preserve import Preserved, Writes, copied_arguments, moved_to, uncollected
from shardwright.partition.recomputed import Recomputed
from shardwright.partition.record import ModuleRecord, Trace
from shardwright.partition.regions import Regions, stays_here
from shardwright.partition.stand_ins import StandIns
from shardwright.partition.tree import ModelTree, ModuleEntry, device_of, why_without_values
from shardwright.partition.unversioned import UnversionedWrites
from shardwright.progress import Progress

_LOGGER = logging.getLogger("shardwright")
_TRACING: ContextVar[bool] = ContextVar("shardwright_tracing", default=False)


def is_tracing() -> bool:
    """Return whether the calling code is run by the trace of the first step, whose results are discarded."""
    return _TRACING.get()


def choose_device(module: nn.Module, trace_device: Literal["cpu", "gpu"]) -> torch.device | None:
    """Return the device on which to trace `module`; None to leave the model where it is.

    ``"gpu"`` means the current CUDA device, or the CPU if there is none. A model on the meta device, and one whose
    parameters are on several devices, stay where they are.
    """
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if len(devices) != 1 or any(device.type == "meta" for device in devices):
        return None
    if trace_device == "gpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def trace_forward(
    module: nn.Module,
    call: Callable[..., object],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: torch.device | None = None,
    by_shapes: bool = False,
    measure_times: bool | None = False,
    measure_memory: bool = False,
    together: Callable[[bool], bool] = bool,
    progress: Progress | None = None,
) -> Trace:
    """Run one forward of `module`, and return what was observed. The forward has no lasting effects.

    Random number generators, buffers, parameters, gradients and attributes of modules are restored, and the caller's
    tensors keep their values, because the forward receives copies. To measure times, the forward runs again, up to
    three times, because observation slows down the first run.

    Args:
        call: Runs the forward on copies of the arguments: the model itself, or any method of it.
        device: The device to run on (see `choose_device`); None leaves model and arguments where they are. On the CPU,
            a module that needs an operation that only the GPU has runs on the GPU, if there is one.
        by_shapes: Whether the parameters are shapes (see `as_shapes`), so that operators are measured on stand-ins.
        measure_times: Whether to measure seconds, which the meta device does not support. None measures them if the
            forward computes enough, and omits them where they cannot be measured.
        measure_memory: Measure the bytes that autograd keeps for the backward, instead of estimating them.
        together: Makes ranks whose modules contain collectives agree on whether a forward runs again.
    Raises:
        PartitionError: Times are to be measured for a model without values (on the meta device, or delayed), or the GPU
            has too little memory.
    """
    progress = progress or Progress(0)
    tree = ModelTree.of(module)
    absent = why_without_values(tree)
    if measure_times and absent is not None:
        raise PartitionError(f"trace_execution_times=True needs a model with values, but this one {absent}")
    where = device or device_of(tree)
    run = _Run(tree, call, tuple(args), dict(kwargs or {}), device, runner_for(where))
    with _tracing(module, where):
        with progress.phase("tracing one forward of the model"):
            recording = run.watched(measure_memory)
            # Modules may change state only in training, which a trace of an evaluation does not show.
            trained = None if module.training else run.watched_in_training()
        measurement = None
        if measure_times or (measure_times is None and absent is None and together(recording.is_large())):
            with progress.phase("measuring how long each module takes"):
                measurement = run.timed(where, by_shapes, needed=bool(measure_times), together=together)
    trace = recording.trace(measurement)
    return trace if trained is None else trace.together_with(trained.trace(None))


@contextlib.contextmanager
def _tracing(module: nn.Module, where: torch.device) -> Iterator[None]:
    """Mark the block as part of a trace, and explain errors due to lack of memory."""
    token = _TRACING.set(True)
    try:
        yield
    except torch.OutOfMemoryError as problem:
        raise PartitionError(
            f"the trace of {type(module).__name__} ran out of memory on {where}: use "
            "smp.DistributedModel(..., trace_device='cpu'), or the configuration key skip_tracing"
        ) from problem
    finally:
        _TRACING.reset(token)


@dataclass
class _Run:
    """Runs the same forward several times, each time from the same state."""

    _tree: ModelTree
    _call: Callable[..., object]
    _args: tuple[Any, ...]
    _kwargs: dict[str, Any]
    _device: torch.device | None
    _runner: Runner
    _written: list[torch.Tensor] = field(default_factory=list)
    _gradients: bool = False
    _preserved: Preserved | None = None

    def watched(self, measure_memory: bool) -> _Recording:
        try:
            return self._watched(measure_memory, gradients=measure_memory)
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:
            # A forward that computes gradients itself (such as forces from an energy), or takes another way where
            # gradients are off, may run only with them; any other error comes again.
            if measure_memory or isinstance(problem, ShardwrightError):
                raise
            _LOGGER.debug("the trace runs again with gradients: %s", problem)
            return self._watched(measure_memory, gradients=True)

    def watched_in_training(self) -> _Recording | None:
        """Return the recording of a forward in training mode; None if it fails, for example for lack of labels."""
        preserved, written, gradients = self._preserved, self._written, self._gradients
        try:
            return self._watched(False, gradients=gradients, training=True)
        except Exception as problem:
            _LOGGER.debug("the trace in training mode was given up: %r", problem)
            return None
        finally:
            self._preserved, self._written, self._gradients = preserved, written, gradients

    def _watched(self, measure_memory: bool, *, gradients: bool, training: bool = False) -> _Recording:
        self._preserved = None  # discards the records of an earlier attempt
        with self._prepared(gradients) as (args, kwargs, writes, preserved):
            for entry in self._tree.modules if training else ():
                entry.module.training = True
            stack = Stack()
            foreign = ForeignTensors(self._tree, writes, (args, kwargs))
            audit = Audit(self._tree, stack, preserved.shared)
            recording = _Recording(self._tree, stack, audit, foreign, writes, measure_memory, preserved)
            with (
                intercepted(self._tree, stack, recording, self._runner),
                recording.audit.watching_attributes(),
                recording.regions.watched(),
                recording.recomputed.watched(),
                recording.saving(),
                OperationMode(recording.operation, recording.written, recording.computed),
            ):
                self._call(*args, **kwargs)
            recording.finish()
            self._written = writes.written()
            self._gradients = gradients
        return recording

    def timed(
        self,
        where: torch.device,
        by_shapes: bool,
        *,
        needed: bool,
        together: Callable[[bool], bool] = bool,
    ) -> Measurement | None:
        """Measure the forward; None if it can run only once and the measurement is not `needed`."""
        try:
            if by_shapes:
                stand_ins = StandIns(where)
                return self._timed(stand_ins.clock, stand_ins)
            return repeated(lambda: self._timed(Clock(where)), together)
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:
            if needed:
                raise
            _LOGGER.warning("the partition goes without measured times, as the forward cannot run again: %r", problem)
            return None

    def _timed(self, clock: Clock, mode: contextlib.AbstractContextManager[Any] | None = None) -> Measurement:
        with self._prepared(self._gradients) as (args, kwargs, writes, _):
            # Observation would slow down this run, but the first one has recorded what is written to.
            for tensor in self._written:
                writes.keep(tensor)
            stack = Stack()
            pieces = Pieces(clock, stack)
            with intercepted(self._tree, stack, pieces, self._runner), mode or contextlib.nullcontext():
                self._call(*args, **kwargs)
                return pieces.measurement(stack)

    @contextlib.contextmanager
    def _prepared(self, gradients: bool) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], Writes, Preserved]]:
        own = {id(entry.tensor) for entry in self._tree.parameters}
        # In inference mode, the copies of buffers would be tensors that cannot be written to outside it.
        with (
            uncollected(),
            torch.inference_mode(False),
            contextlib.ExitStack() as stack,
        ):
            preserved = self._preserved = self._preserved or Preserved(self._tree)
            writes = stack.enter_context(preserved.during())
            stack.enter_context(sync_batch_norm.on_one_rank())
            if self._device is not None:
                stack.enter_context(moved_to(self._tree, self._device))
            stack.enter_context(torch.set_grad_enabled(gradients))
            args, kwargs = copied_arguments(
                self._args, self._kwargs, self._device, keep=lambda tensor: id(tensor) in own
            )
            yield args, kwargs, writes, preserved


class _Recording:
    """The records of an observed run, and the observer that makes them."""

    def __init__(
        self,
        tree: ModelTree,
        stack: Stack,
        audit: Audit,
        foreign: ForeignTensors,
        writes: Writes,
        measure_memory: bool,
        preserved: Preserved,
    ) -> None:
        self.audit = audit
        self._shared = preserved.shared
        self._foreign = foreign
        self.recomputed = Recomputed(tree, stack)
        self._unversioned = UnversionedWrites(tree, stack, preserved.plain)
        self.regions = Regions(saves_tensors=measure_memory)
        self._tree = tree
        self._stack = stack
        self._writes = writes
        self._measure_memory = measure_memory
        self._first: dict[str, int] = {}
        self._calls: dict[tuple[str, str], int] = {}
        self._output_bytes: dict[str, int] = {}
        self._input_bytes: dict[str, int] = {}
        self._operations: dict[str, int] = {}
        self._kept = DistinctStorages()
        self._kept_bytes: dict[str, int] = {}
        self._own_storages = {
            entry.tensor.untyped_storage()._cdata
            for entry in (*tree.parameters, *tree.buffers)
            if entry.tensor.layout is torch.strided
        }
        self._joins: tuple[JoinReason, ...] = ()

    def called(self, execution: Execution, caller: Execution, arguments: object) -> None:
        tensors, path = tensors_in(arguments), execution.path
        self.audit.called(execution, caller, tensors, self.regions.why_whole(arguments))
        self._input_bytes[path] = self._input_bytes.get(path, 0) + sum(t.numel() * t.element_size() for t in tensors)
        self.recomputed.called(path)
        self._first.setdefault(path, len(self._first))
        self._calls[(caller.path, path)] = self._calls.get((caller.path, path), 0) + 1

    def returned(self, execution: Execution, caller: Execution, result: object) -> None:
        self.recomputed.returned(execution.path)
        tensors = tensors_in(result)
        self.audit.returned(execution, caller, tensors)
        path = execution.path
        foreign = stays_here(result)
        if foreign is not None:
            self.audit.join(caller.path, path, f"gets a {foreign} from it")
        for tensor in tensors:
            self._output_bytes[path] = self._output_bytes.get(path, 0) + tensor.numel() * tensor.element_size()
            if not self._measure_memory:
                self._keep(path, tensor)

    def operation(self, func: Any, tensors: list[torch.Tensor]) -> None:
        self.audit.operation(func, tensors)
        self._unversioned.operation(func, tensors)
        self._foreign.read(func, tensors, self._stack.top.path)

    def written(self, tensor: torch.Tensor) -> None:
        self._writes.before_write(tensor)
        self.audit.written(tensor)
        self._unversioned.written(tensor)
        self._foreign.written(tensor, self._stack.top.path)

    def computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self._foreign.made(result)
        operations = operation_count(func, args, result)
        if operations == 0:
            return
        for path in {execution.path for execution in self._stack.executions}:
            self._operations[path] = self._operations.get(path, 0) + operations

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Measure what autograd saves, without keeping it."""
        if not self._measure_memory:
            yield
            return

        def pack(tensor: torch.Tensor) -> None:
            if self._stack.here():
                self._keep(self._stack.top.path, tensor)

        def unpack(packed: None) -> torch.Tensor:
            raise PartitionError("a backward was run inside the trace with trace_memory_usage=True")

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _keep(self, path: str, tensor: torch.Tensor) -> None:
        if tensor.layout is torch.strided and tensor.untyped_storage()._cdata not in self._own_storages:
            self._kept_bytes[path] = self._kept_bytes.get(path, 0) + self._kept.keep(tensor)

    def finish(self) -> None:
        for user, writer in self._foreign.shared():
            self.audit.join(user, writer, "uses a tensor that the other writes to, which no module has as a buffer")
        for users in self._foreign.changed():
            self.audit.keep((), users)
        self.audit.written_parameters(self._writes.written())
        for names, users, is_needed in self._unversioned.found():
            self.audit.keep(names, users)
            if is_needed:
                self.audit.one_at_a_time(f"{names[0]} is written to past its version")
        join_hooks(self._tree, self.audit, self._shared)
        joins = self.audit.joins()
        self._joins = (*joins, *self.recomputed.joins(self.audit.kept()))

    def is_large(self) -> bool:
        """Return whether the forward computes enough to be measured."""
        return self._operations.get("", 0) >= MIN_OPERATIONS

    def trace(self, measurement: Measurement | None) -> Trace:
        num_calls: dict[str, int] = {}
        for (_, callee), count in self._calls.items():
            num_calls[callee] = num_calls.get(callee, 0) + count
        if measurement is not None:
            measurement = evened(measurement, {entry.path: self._kind(entry) for entry in self._tree.modules})
        seconds = None if measurement is None else measurement.own_seconds()
        records = {
            entry.path: ModuleRecord(
                execution_index=self._first.get(entry.path),
                num_calls=num_calls.get(entry.path, 0),
                own_seconds=None if seconds is None else seconds.get(entry.path, 0.0),
                operations=self._operations.get(entry.path, 0),
                own_activation_bytes=self._kept_bytes.get(entry.path, 0),
                input_bytes=self._input_bytes.get(entry.path, 0),
            )
            for entry in self._tree.modules
        }
        return Trace(
            modules=records,
            calls=tuple((caller, callee, count) for (caller, callee), count in self._calls.items()),
            joins=self._joins,
            written_buffers=self.audit.written_buffers(),
            attributes=self.audit.attributes(),
            temporaries=self.audit.temporaries(),
            reads=self.audit.reads(),
            flows=self.audit.flows(),
            kept=self.audit.kept(),
            measurement=measurement,
        )

    def _kind(self, entry: ModuleEntry) -> tuple[str, int, int]:
        """Return a key that is equal for modules expected to take equally long."""
        operations, nbytes = (of.get(entry.path, 0) for of in (self._operations, self._output_bytes))
        return type(entry.module).__qualname__, operations, nbytes
