"""Frames: the state of an execution until its backward."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node

from shardwright.errors import FrameError
from shardwright.frames.checkpointing import Checkpointing
from shardwright.frames.cut import Slot, gradient_edge, hook_on
from shardwright.frames.leaves import Leaves
from shardwright.frames.watch import RemoteMemory, Watched

Hook = Callable[[torch.Tensor], Any]
TensorHooks = dict[tuple[Node, int], list[Hook]]


@dataclass(frozen=True, slots=True)
class Passed:
    """A call whose results were sent directly to the next rank as its arguments.

    Attributes:
        rank: The global rank that executed it.
        module: The module's name.
        module_id: The module's id in its model.
        request: The id of the forward request.
        number: The call's number in the frame.
    """

    rank: int
    module: str
    module_id: int
    request: int
    number: int


@dataclass(slots=True, eq=False)
class Call:
    """A remote call of a frame, as needed for its backward.

    Attributes:
        rank: The global rank that executed it.
        module: The module's name.
        module_id: The module's id in its model.
        model_id: The model's id.
        request: The id of the forward request.
        number: The call's number in the frame.
        inputs: For each argument that needs a gradient, its edge, taken at the call, and its index in the request.
        results: For each differentiable result, its slot and its index in the response.
        passed: The previous calls of its chain, whose ranks sent their results to the next; ``inputs`` are then those
            of the first call.
        onward: In the backward, the call whose results are its arguments, with the index of the result for the index
            of each argument. The rank of that call gets the gradients directly from the rank of this one.
    """

    rank: int
    module: str
    module_id: int
    model_id: int
    request: int
    number: int
    inputs: list[tuple[GradientEdge, int]]
    results: list[tuple[Slot, int]]
    passed: list[Passed] = field(default_factory=list)
    onward: tuple[Call, dict[int, int]] | None = None

    @property
    def modules(self) -> list[tuple[int, int]]:
        """The modules that ran, as pairs of model id and module id."""
        return [(self.model_id, one.module_id) for one in self.passed] + [(self.model_id, self.module_id)]


@dataclass(slots=True)
class KeptGradient:
    """A tensor whose gradient is retained.

    Attributes:
        tensor: The tensor.
        edge: Its gradient edge when ``retain_grad`` was called.
        version: Its version at that time.
    """

    tensor: weakref.ref[torch.Tensor]
    edge: GradientEdge
    version: int

    def edge_now(self) -> GradientEdge | None:
        """The current gradient edge of the tensor, after in-place operations; None if the tensor was freed."""
        tensor = self.tensor()
        if tensor is None or tensor._version == self.version:
            return None if tensor is None else self.edge
        if tensor._is_view():
            raise FrameError(
                "retain_grad was called on a view whose memory was written to later; torch then keeps the gradient of "
                "before the write or of after it, depending on who looked at the view between: call it on a clone()"
            )
        return self.edge if tensor.grad_fn is None else gradient_edge(tensor)

    def keep(self, gradient: torch.Tensor) -> None:
        """Retain the gradient; used as a hook."""
        tensor = self.tensor()
        if tensor is not None:
            tensor.grad = gradient.clone() if tensor.grad is None else tensor.grad + gradient


@dataclass(slots=True, eq=False, weakref_slot=True)
class Frame:
    """An execution of a request, or of the step function for a microbatch (``request`` is then None).

    Attributes:
        microbatch: The microbatch.
        request: The id of the request that is executed; None for the step function.
        requester: The global rank that made the request.
        name: A description of the execution, for error messages.
        executed: The modules that it runs, one after another; empty for the step function.
        calls: The remote calls that still wait for their backward, in order.
        inputs: The slots of the arguments that need a gradient, with their index in the request.
        results: The edges of the differentiable results, with their index in the response.
        hooks: Hooks on tensors of this frame, by node and output number.
        kept_gradients: Tensors whose gradient is retained.
        spanning: Whether modules inside it are on other ranks; only then is its own code guarded.
        unhookable: Nodes of tensors on which a hook would not see the whole gradient, and why.
        retain_graph: Whether saved tensors are retained, for state that a module keeps between its calls.
        checkpointing: How the modules called in its own code are checkpointed by the ranks that run them; None if not.
        arguments: The arguments' tensors.
        hooked: Whether its code registered a hook on a tensor, or it returns a result of a module that did.
        hooked_elsewhere: Nodes of results of modules on other ranks that registered hooks on tensors of their own, or
            that returned a result of such a module.
        answers: Whether a result needs a gradient.
        guarded: Nodes with hooks, which run only in this frame's backward.
        in_backward: Whether its backward is running.
        elsewhere: Which of its tensors share memory, or are kept, on other ranks.
        checkpointed: Whether anything in it is recomputed in the backward.
        leaves: Checks the leaves that its backward reaches.
        place: The seed that identifies where in the microbatch it was called.
    """

    microbatch: int
    request: int | None = None
    requester: int | None = None
    name: str = "the step function"
    executed: list[nn.Module] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    inputs: list[tuple[Slot, int]] = field(default_factory=list)
    results: list[tuple[GradientEdge, int]] = field(default_factory=list)
    hooks: dict[tuple[Node, int], dict[int, Hook]] = field(default_factory=dict)
    kept_gradients: list[KeptGradient] = field(default_factory=list)
    spanning: bool = True
    checkpointing: Checkpointing | None = None
    num_calls: int = 0
    unhookable: dict[Node, str] = field(default_factory=dict)
    retain_graph: bool = False
    arguments: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    hooked: bool = False
    hooked_elsewhere: set[Node] = field(default_factory=set)
    answers: bool = False
    guarded: set[Node] = field(default_factory=set)
    in_backward: bool = False
    elsewhere: RemoteMemory = field(default_factory=RemoteMemory)
    checkpointed: bool = False
    leaves: Leaves = field(default_factory=Leaves)
    place: int = 0
    _watched: list[Watched] = field(default_factory=list)

    @property
    def splits(self) -> bool:
        """Whether the backward can be split, which runs some nodes twice and retains their saved tensors."""
        return not (self.hooked or self.retain_graph or self.checkpointed)

    def trial(self) -> Frame:
        """Create a frame for a trial run of the same code, which applies the same checks and is then discarded."""
        return Frame(
            self.microbatch,
            self.request,
            self.requester,
            self.name,
            self.executed,
            arguments=self.arguments,
            leaves=self.leaves,
        )

    def next_call_number(self) -> int:
        """Return the number of the next remote call of this frame."""
        number, self.num_calls = self.num_calls, self.num_calls + 1
        return number

    def inputs_live(self) -> bool:
        """Whether a graph still contains an argument, through a result or through state of the module."""
        return any(slot.reached() for slot, _ in self.inputs)

    def watch(self, tensor: torch.Tensor, why: str) -> None:
        """Forbid in-place writes to the memory of a tensor from now on; see :meth:`settle`."""
        if not tensor.is_inference() or tensor.layout is torch.strided:  # values of others cannot be compared
            self._watched.append(Watched(tensor, why))

    def guard(self, node: Node) -> None:
        """Forbid gradients that reach a node with hooks outside this frame's backward: the hooks would not see them."""
        if node in self.guarded:
            return
        self.guarded.add(node)
        owner = weakref.ref(self)  # a weak reference, because the frame keeps the node

        def check(*_: object) -> None:
            frame = owner()
            if frame is None or not frame.in_backward:
                raise FrameError(
                    "a gradient reached a tensor with a hook (or retain_grad) from outside the call that made it: a "
                    "module carried the tensor to another call or microbatch, where hooks are not seen; detach it, or "
                    "register the hook on a clone()"
                )

        hook_on(node, "register_prehook", check)

    def settle(self) -> None:
        """Raise :class:`FrameError` if a watched tensor was written to: at the frame's end and before the backward."""
        for watched in self._watched:
            watched.check(self.microbatch)

    def forget_watched(self) -> None:
        """Stop watching tensors after the backward, when writes can no longer change results."""
        self._watched.clear()

    def all_hooks(self) -> TensorHooks:
        """Return the hooks to run in the backward, in order. As in torch, those that retain a gradient are last."""
        hooks = {edge: list(those.values()) for edge, those in self.hooks.items() if those}
        for kept in self.kept_gradients:
            edge = kept.edge_now()
            if edge is not None:
                if edge.node in self.unhookable:
                    raise FrameError(f"a hook (or retain_grad) on {self.unhookable[edge.node]}")
                hooks.setdefault((edge.node, edge.output_nr), []).append(kept.keep)
        return hooks


class _Current(threading.local):
    frame: Frame | None = None


_current = _Current()


def current_frame() -> Frame | None:
    """Return the frame whose own code this thread is running, or None."""
    return _current.frame


class _InFrame:
    """Run a block as the frame's own code; with None, nothing is intercepted."""

    __slots__ = ("_frame", "_previous")

    def __init__(self, frame: Frame | None) -> None:
        """Create the context manager for a block of this frame."""
        self._frame = frame

    def __enter__(self) -> None:
        self._previous, _current.frame = _current.frame, self._frame

    def __exit__(self, *_: object) -> None:
        _current.frame = self._previous


in_frame = _InFrame
