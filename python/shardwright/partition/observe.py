"""Observes one forward from outside: which module runs when, and every operation that it executes."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardwright.dispatch_mode import DispatchMode, write_positions
from shardwright.partition.tree import ModelTree
from shardwright.values.arrays import is_array
from shardwright.values.registry import registry
from shardwright.values.state import attributes_of


@dataclass(eq=False)
class Execution:
    """A running module: one entry of the call stack.

    Attributes:
        path: The module's path.
        given: Ids of the model's own tensors that it received as arguments or as results of modules it called.
        entered: Whether its ``forward`` has begun. Its hooks run before that.
    """

    path: str
    given: set[int] = field(default_factory=set)
    entered: bool = False


class ForwardObserver(Protocol):
    """Observer that is notified about a forward while it runs."""

    def called(self, execution: Execution, caller: Execution, arguments: object) -> None:
        """Handle the call of a module by `caller`."""

    def returned(self, execution: Execution, caller: Execution, result: object) -> None:
        """Handle the return of a module's result to its caller."""


Runner = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Runs a function of a module: called with the module, the function and the function's arguments."""


def run_plainly(module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function with the arguments, and do nothing else."""
    return function(*args, **kwargs)


class Stack:
    """The modules that are running on the observed thread, innermost last.

    The outermost entry stands for the code around the model and counts as the root module.
    """

    def __init__(self) -> None:
        """Start outside all modules, on the calling thread."""
        self.thread = threading.get_ident()
        self.executions = [Execution(path="", entered=True)]

    @property
    def top(self) -> Execution:
        """The innermost running module."""
        return self.executions[-1]

    def here(self) -> bool:
        """Return whether the caller is the observed thread."""
        return threading.get_ident() == self.thread


@contextlib.contextmanager
def intercepted(
    tree: ModelTree, stack: Stack, observer: ForwardObserver, runner: Runner = run_plainly
) -> Iterator[None]:
    """Notify `observer` of every call of a module of `tree`, however it is called.

    The interception is per instance: it covers the call, so that hooks of a module run inside it, and ``forward``, for
    direct calls and for classes with their own ``__call__``. Compiled modules run uncompiled. The caller must restore
    the modules' attributes afterwards, which removes the interception.
    """
    for entry in tree.modules:
        wrapper = _Wrapper(entry.module, entry.path, stack, observer, runner)
        entry.module.__dict__["_compiled_call_impl"] = wrapper.wrapped_call(entry.module._call_impl)
        if not isinstance(entry.module, torch.jit.ScriptModule):
            entry.module.__dict__["forward"] = wrapper.wrapped_forward(entry.module.forward)
    with uncompiled():
        yield


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled modules uncompiled, because operations inside compiled code cannot be observed."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@dataclass
class _Wrapper:
    _module: nn.Module
    _path: str
    _stack: Stack
    _observer: ForwardObserver
    _runner: Runner

    def wrapped_call(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._stack.here():
                return inner(*args, **kwargs)
            return self._execute(Execution(path=self._path), inner, args, kwargs)

        return call

    def wrapped_forward(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._stack.here():
                return inner(*args, **kwargs)
            top = self._stack.top
            if top.path == self._path and not top.entered:
                top.entered = True
                return inner(*args, **kwargs)
            return self._execute(Execution(path=self._path, entered=True), inner, args, kwargs)

        return forward

    def _execute(
        self, execution: Execution, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        caller = self._stack.top
        entered = execution.entered

        def attempt(*args: Any, **kwargs: Any) -> Any:
            execution.entered = entered
            return inner(*args, **kwargs)

        self._observer.called(execution, caller, (args, kwargs))
        self._stack.executions.append(execution)
        try:
            result = self._runner(self._module, attempt, args, kwargs)
        finally:
            self._stack.executions.pop()
        self._observer.returned(execution, caller, result)
        return result


class OperationMode(DispatchMode):  # type: ignore[no-untyped-call]
    """Passes every operation that reaches PyTorch's dispatcher to functions, before and after it runs."""

    supports_higher_order_operators = True

    def __init__(
        self,
        before: Callable[[Any, list[torch.Tensor]], None],
        written: Callable[[torch.Tensor], None],
        after: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None],
    ) -> None:
        """Store the three functions.

        Args:
            before: Called with the operation and the flat list of its tensor arguments.
            written: Called with each tensor that the operation is about to write to.
            after: Called with the operation, its arguments and its result.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._before = before
        self._written = written
        self._after = after
        self._write_positions: dict[Any, tuple[tuple[int, str], ...]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Report the operation and run it."""
        kwargs = kwargs or {}
        tensors: list[torch.Tensor] = []
        for argument in args:
            _collect(argument, tensors)
        for argument in kwargs.values():
            _collect(argument, tensors)
        positions = self._write_positions.get(func)
        if positions is None:
            positions = self._write_positions[func] = _write_positions(func)
        if positions is _RUNNING_STATISTICS and not args[5]:  # not written outside training
            positions = ()
        for index, name in positions:
            destinations: list[torch.Tensor] = []
            _collect(args[index] if index < len(args) else kwargs.get(name), destinations)
            for destination in destinations:
                self._written(destination)
        self._before(func, tensors)
        result = func(*args, **kwargs)
        self._after(func, args, kwargs, result)
        return result


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return the distinct tensors in arguments or results."""
    found: dict[int, torch.Tensor] = {}
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            while torch._C._functorch.is_functorch_wrapped_tensor(leaf):  # inside vmap or grad
                leaf = torch._C._functorch.get_unwrapped(leaf)
            found[id(leaf)] = leaf
        elif is_array(leaf):
            continue  # sent as a separate tensor
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found.update((id(tensor), tensor) for tensor in tensors_in(attributes_of(leaf)))
        elif (fields := registry.fields_of(leaf)) is not None:
            found.update((id(tensor), tensor) for tensor in tensors_in(fields))
    return list(found.values())


def _collect(argument: object, tensors: list[torch.Tensor]) -> None:
    if isinstance(argument, torch.Tensor):
        tensors.append(argument)
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            if isinstance(item, torch.Tensor):
                tensors.append(item)


#: The arguments that batch normalization writes to, by position and name. Its schemas do not declare these writes.
_RUNNING_STATISTICS = ((3, "running_mean"), (4, "running_var"))
_BATCH_NORMALISATIONS = ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")


def _write_positions(func: Any) -> tuple[tuple[int, str], ...]:
    schema = getattr(func, "_schema", None)
    if schema is not None and schema.name in _BATCH_NORMALISATIONS:
        return _RUNNING_STATISTICS
    return write_positions(func)


class Clock:
    """Measures intervals of work on one device, without synchronizing a GPU.

    On the CPU it measures the CPU time of the thread, which takes part in all multithreaded operators. Wall-clock time
    would also include the effects of other load on the machine.
    """

    def __init__(self, device: torch.device) -> None:
        """Use CUDA events on a GPU, and the thread's CPU time on other devices."""
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._stretches: list[tuple[int, Any, Any]] = []

    def now(self) -> Any:
        """Return the current time, as a value for `add`."""
        if not self._on_gpu:
            return time.thread_time()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def add(self, number: int, started: Any) -> None:
        """Record that the work with this number lasted from `started` until now."""
        self._stretches.append((number, started, self.now()))

    def stretches(self) -> list[tuple[int, float]]:
        """Return the number and the seconds of each interval, in order."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        return [
            (number, started.elapsed_time(ended) / 1000 if self._on_gpu else ended - started)
            for number, started, ended in self._stretches
        ]
