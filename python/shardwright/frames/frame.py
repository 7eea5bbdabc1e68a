"""What one execution remembers until its backward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, Node

from shardwright.errors import FrameError
from shardwright.frames.cut import Slot

Hook = Callable[[torch.Tensor], torch.Tensor | None]


@dataclass(slots=True, eq=False)
class Call:
    """A remote call made from a frame, as far as its backward needs it.

    Attributes:
        rank: The global rank that executed it.
        module: The module's name.
        module_id: The module's id in its model.
        model_id: The model.
        request: The id of the forward request.
        number: The call's number in the frame.
        inputs: For each argument that needs a gradient its edge, taken at the call, and its index in the request.
        results: For each differentiable result its slot and its index in the response.
    """

    rank: int
    module: str
    module_id: int
    model_id: int
    request: int
    number: int
    inputs: list[tuple[GradientEdge, int]]
    results: list[tuple[Slot, int]]


@dataclass(slots=True, eq=False)
class Frame:
    """One execution: of a request, or of the step function for one microbatch (``request`` is then None).

    Attributes:
        microbatch: The microbatch.
        request: The id of the request that is executed, None for the step function.
        requester: The global rank that made the request.
        name: What is executed, for errors.
        calls: The remote calls that still wait for their backward, in order.
        inputs: The slots of the arguments that need a gradient, with their index in the request.
        results: The edges of the differentiable results, with their index in the response.
        hooks: Hooks on tensors of this frame, by node and output number.
        spanning: Whether modules inside it live on other ranks; only then its own code is guarded.
        written: Nodes of tensors that a remote module wrote to.
        retain_graph: Keep buffers for state that a re-used module carries between its calls.
        checkpointing: How many ``torch.utils.checkpoint`` regions of the frame's own code are open.
    """

    microbatch: int
    request: int | None = None
    requester: int | None = None
    name: str = "the step function"
    calls: list[Call] = field(default_factory=list)
    inputs: list[tuple[Slot, int]] = field(default_factory=list)
    results: list[tuple[GradientEdge, int]] = field(default_factory=list)
    hooks: dict[tuple[Node, int], dict[int, Hook]] = field(default_factory=dict)
    spanning: bool = True
    checkpointing: int = 0
    num_calls: int = 0
    written: set[Node] = field(default_factory=set)
    retain_graph: bool = False
    _fragile: list[tuple[str, torch.Tensor, int]] = field(default_factory=list)

    def next_call_number(self) -> int:
        """The number of the next remote call of this frame."""
        number, self.num_calls = self.num_calls, self.num_calls + 1
        return number

    def watch(self, module: str, tensor: torch.Tensor) -> None:
        """Remember a result that shares memory in a way that cannot be rebuilt here; see :meth:`settle`."""
        self._fragile.append((module, tensor, tensor._version))

    def settle(self) -> None:
        """Raise :class:`FrameError` if a result that shares memory was written since it came back."""
        for module, tensor, version in self._fragile:
            if tensor._version != version:
                raise FrameError(
                    f"module {module!r} returned tensors that share memory, and one of them was written to in place "
                    f"later (microbatch {self.microbatch}): the write cannot reach the other one across ranks; "
                    "return a clone() from the module, or write to a clone"
                )
        self._fragile.clear()


class _Current(threading.local):
    frame: Frame | None = None


_current = _Current()


def current_frame() -> Frame | None:
    """The frame whose own code this thread is running, or None."""
    return _current.frame


@contextmanager
def in_frame(frame: Frame | None) -> Iterator[None]:
    """Run the block as the frame's own code (None: as code that nothing is intercepted in)."""
    previous, _current.frame = _current.frame, frame
    try:
        yield
    finally:
        _current.frame = previous
