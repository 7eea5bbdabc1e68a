"""Cuts: the points where a tensor enters or leaves the graph of another rank."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NoReturn, Protocol

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from shardwright import _core
from shardwright.devices import current_stream
from shardwright.errors import FrameError
from shardwright.frames.remote import Arrival, RemoteTensor, made_by, quiet

#: The number of the library's engine calls that are running, over all threads: a backward that a node starts may run on
#: another thread of autograd, so this cannot be thread-local.
_engine_calls = 0


class _Calling(threading.local):
    #: The current stream of the thread's innermost engine call; None without CUDA.
    stream: Any = None


_calling = _Calling()
#: Whether edges in this version of torch keep the nodes of Python functions alive.
_EDGES_OWN = "ownership_token" in GradientEdge._fields
_NO_OWNER = (None,) if _EDGES_OWN else ()
_OWNS = "shardwright.owns"


class EngineWatcher(Protocol):
    """An observer of changes that a backward makes to values used by forwards."""

    def seen(self) -> Any:
        """Return a record of the current values; None if the call does not concern the watcher."""

    def check_backward(self, before: Any) -> None:
        """Raise if the values have changed since the record."""

    def values_changed(self, before: Any) -> bool:
        """Return whether values have changed since the record, except by in-place writes to tensors."""

    def keeper(self) -> nn.Module | None:
        """Return the innermost module with state whose code is running; None if there is none."""

    def computed_once(self) -> AbstractContextManager[None]:
        """Return the context manager for its code inside a checkpoint that is applied to the modules called in it."""


engine_watchers: weakref.WeakSet[EngineWatcher] = weakref.WeakSet()


class EngineCall:
    """Mark engine calls of a frame's own backward; a gradient that reaches a cut outside of one is an error.

    All nodes run on the calling thread, those of devices too. Torch would run the latter on one thread for each device,
    whoever calls the engine. A task that waits there for another rank would give its turn to a task whose backward then
    waits for that thread.
    """

    def __enter__(self) -> None:
        """Increment the number of engine calls."""
        global _engine_calls
        self._stream = _calling.stream
        _calling.stream = torch.cuda.current_stream() if torch.cuda._initialized else None
        self._on_threads = torch._C._is_multithreading_enabled()
        torch._C._set_multithreading_enabled(False)
        _engine_calls += 1
        self._before = [(one, one.seen()) for one in engine_watchers] if engine_watchers else ()

    def __exit__(self, kind: object, *_: object) -> None:
        """Decrement the number of engine calls."""
        global _engine_calls
        torch._C._set_multithreading_enabled(self._on_threads)
        _calling.stream = self._stream
        _engine_calls -= 1
        if kind is None:
            for watcher, before in self._before:
                if before is not None:
                    watcher.check_backward(before)


class Slot:
    """The accumulated gradient of one cut tensor. The cut's node refers to it; it refers to the node only weakly."""

    __slots__ = ("_what", "closed", "gradient", "node")

    def __init__(self, *what: str) -> None:
        """Create an empty slot; ``what`` names the tensor in error messages: a kind, and possibly the module's name."""
        self._what = what
        self.gradient: torch.Tensor | None = None
        self.closed = False
        #: The node of the cut.
        self.node: weakref.ref[Any] | None = None

    @property
    def what(self) -> str:
        """The tensor's name, for error messages."""
        kind, *names = self._what
        return " ".join([kind, *map(repr, names)])

    def reached(self) -> bool:
        """Whether a graph still contains the cut."""
        return self.node is not None and self.node() is not None

    def add(self, gradient: torch.Tensor) -> None:
        """Add a gradient; raise :class:`FrameError` if the gradient was already taken."""
        if self.closed:
            raise FrameError(
                f"a gradient reached {self.what} after its backward had run: model.backward came to it a second time "
                "(give all losses to one call of it), or a tensor left the call by another way than its arguments and "
                "results (an attribute, a closure or a global)"
            )
        self.gradient = gradient if self.gradient is None else self.gradient + gradient

    def take(self) -> torch.Tensor | None:
        """Return the gradient and close the slot, which must not keep it, because its node outlives the call."""
        gradient, self.gradient, self.closed = self.gradient, None, True
        return gradient


class SlotEnd:
    """The end of the graph at a remote tensor that nothing on this rank has used.

    It replaces a node in edges and levels, but is never passed to torch's engine.
    """

    __slots__ = ("slot",)
    next_functions = ()
    metadata: ClassVar[dict[str, Node]] = {}

    def __init__(self, slot: Slot) -> None:
        """Create the end of the graph for the slot that accumulates the cut's gradient."""
        self.slot = slot


class _Cut(torch.autograd.Function):
    """Create a non-leaf tensor whose backward only adds its gradient to a slot."""

    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, box: list[torch.Tensor], slot: Slot) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.slot = slot
        slot.node = weakref.ref(ctx)
        return box.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        if not _engine_calls:
            raise FrameError(
                f"a gradient was asked for through {ctx.slot.what}, outside model.backward: torch.autograd.grad and "
                "Tensor.backward cannot cross ranks; call model.backward(loss) in the step function instead"
            )
        if torch.is_grad_enabled():
            raise FrameError(f"create_graph=True is not supported through {ctx.slot.what}, which lies on another rank")
        if gradients[0] is not None:
            _add(ctx.slot, gradients[0])
        return None, None, None


def _add(slot: Slot, gradient: torch.Tensor) -> None:
    """Add a gradient to a slot, in the order of the stream of who called the engine, who uses it next.

    The engine runs a node on the stream of its forward. Before it returns, it orders the leaves' streams before the
    caller's; a cut is no leaf.
    """
    made, caller = current_stream(gradient.device), _calling.stream
    if made is None or caller is None or caller == made:
        slot.add(gradient)
        return
    caller.wait_stream(made)
    gradient.record_stream(caller)
    with torch.cuda.stream(caller):
        slot.add(gradient)


def _refuse_hook(node: Any, hook: object) -> NoReturn:
    """Replacement of a node's ``register_hook`` and ``register_prehook``, which raises an error."""
    slot = slot_of(made_by(node))
    assert slot is not None, "only cuts and what has arrived at one refuse hooks"
    raise FrameError(
        f"a hook was put on grad_fn of {slot.what}: that node is on another rank, where this hook would not run. Use "
        "register_hook of the tensor itself (of an argument: where the tensor is made), which is given the "
        "whole gradient"
    )


for _kind in (_Cut, Arrival):
    _kind._backward_cls.register_hook = _kind._backward_cls.register_prehook = _refuse_hook  # type: ignore[attr-defined]


def hook_on(node: Node, register: str, hook: Callable[..., Any]) -> Any:
    """Register a hook of the library on a node, which may be the node of a cut."""
    kind: Any = torch._C._FunctionBase if isinstance(node, torch._C._FunctionBase) else type(node)
    return getattr(kind, register)(node, hook)


#: Without the checks of ``Function.apply``: calls under ``torch.func`` transforms are refused before.
_cut: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Cut).apply
_anchors: dict[torch.device, torch.Tensor] = {}


def _anchor(device: torch.device) -> torch.Tensor:
    """Return the leaf that makes a cut's output require a gradient; one per device, so that cuts stay on its thread."""
    anchor = _anchors.get(device)
    if anchor is None:
        with torch.inference_mode(False), torch.no_grad():
            anchor = torch.zeros((), device=device)
        _anchors[device] = anchor.requires_grad_()
    return anchor


def cut(tensor: torch.Tensor, *what: str) -> tuple[torch.Tensor, Slot]:
    """Make a tensor without autograd history the head of a new graph.

    Args:
        tensor: A tensor that nothing else refers to, without a graph; it becomes the result.
        what: Names the tensor in error messages: a kind, and possibly the module's name.

    Returns:
        The tensor, now a non-leaf that requires a gradient and supports in-place operations, and the slot that
        accumulates its gradient.
    """
    slot = Slot(*what)
    if type(tensor) is RemoteTensor:
        with quiet():
            anchor = _anchor(tensor.device)
        tensor.end = SlotEnd(slot)
    else:
        anchor = _anchor(tensor.device)
    with _core.GradMode(True):  # regardless of the caller's mode, which is sent with the request
        return _cut(anchor, [tensor], slot), slot


def gradient_edge(tensor: torch.Tensor) -> GradientEdge:
    """Return the edge at which a tensor's gradient enters the graph, in every mode: torch finds a leaf's by a view."""
    if not torch.is_inference_mode_enabled():
        return get_gradient_edge(tensor)
    with torch.inference_mode(False):
        return get_gradient_edge(tensor)


def owning_edge(tensor: torch.Tensor) -> GradientEdge:
    """Return the edge at which a tensor's gradient enters the graph; the edge keeps the graph behind it alive.

    The node of a Python function lives only as long as a tensor, an edge's token (in newer versions of torch) or a node
    in front of it. Without tokens, a node is inserted in front of it, which takes no memory of the tensor's size.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return owning_edge(tensor)
    if isinstance(tensor, RemoteTensor) and tensor.here is None:
        assert isinstance(tensor.end, SlotEnd), "it requires a gradient"
        return GradientEdge(tensor.end, 0, *_NO_OWNER)  # type: ignore[arg-type]
    node = tensor.grad_fn
    if node is None:
        return get_gradient_edge(tensor)
    if not isinstance(node, torch._C._FunctionBase):
        return GradientEdge(node, tensor.output_nr, *_NO_OWNER)
    with _core.GradMode(True):
        before = tensor.view_as(tensor)
    if _EDGES_OWN:
        return GradientEdge(node, tensor.output_nr, before.grad_fn)
    owning = get_gradient_edge(before)
    owning.node.metadata[_OWNS] = node
    return owning


def owned_by(node: Node) -> Node:
    """Return the node in front of which :func:`owning_edge` inserted this node; any other node itself."""
    if _EDGES_OWN:
        return node
    metadata: Any = node.metadata  # declared as a method in torch's type stubs
    owned: Node = metadata.get(_OWNS, node)
    return owned


def edge_of(tensor: torch.Tensor) -> GradientEdge | None:
    """Return the edge of a tensor's gradient; None if torch drops the gradient.

    Torch drops it for a view created under ``no_grad`` of a tensor that requires a gradient, although the view reports
    that it requires one.
    """
    try:
        return owning_edge(tensor)
    except AssertionError:
        return None
    except RuntimeError as error:  # torch refuses to use one of several views of a tensor that was written to
        if torch.is_grad_enabled():
            raise FrameError(str(error)) from error
        return None


def slot_of(node: object) -> Slot | None:
    """Return the slot that accumulates the gradient arriving at a node; None for a node that is not a cut."""
    kind = type(node)
    if kind is not SlotEnd and getattr(kind, "_forward_cls", None) is not _Cut:
        return None
    slot: Slot = node.slot  # type: ignore[attr-defined]
    return slot
