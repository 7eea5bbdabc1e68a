"""The executing side of a request: forward, backward, close."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from shardwright import _core
from shardwright.execution.call import ServerBackward
from shardwright.execution.context import TaskState
from shardwright.execution.exchange import Arguments, describe_results
from shardwright.execution.task import RunningTask
from shardwright.frames import Frame, cut, in_frame, run_backward
from shardwright.frames.backward import close_calls
from shardwright.values import pack, registry, unpack

if TYPE_CHECKING:
    from shardwright.runtime import Runtime

#: A frame's key: who asked, and the id of the forward request.
FrameKey = tuple[int, int]


class FrameTable:
    """The frames of the requests that this rank has run forward and that still wait for their backward."""

    def __init__(self) -> None:
        """Start empty; it is empty again after every step."""
        self._frames: dict[FrameKey, Frame] = {}
        self._visits: Counter[tuple[int, int, int]] = Counter()

    def __len__(self) -> int:
        """How many frames wait."""
        return len(self._frames)

    def visit(self, model: int, module: int, microbatch: int) -> None:
        """Count an execution of a module for a microbatch."""
        self._visits[model, module, microbatch] += 1

    def visited_again(self, model: int, module: int, microbatch: int) -> bool:
        """Whether the module ran more than once for this microbatch; state may then be carried between calls."""
        return self._visits[model, module, microbatch] > 1

    def keep(self, key: FrameKey, frame: Frame) -> None:
        """Keep a frame until its backward or close."""
        self._frames[key] = frame

    def take(self, key: FrameKey) -> Frame:
        """Give a frame away."""
        return self._frames.pop(key)

    def clear(self) -> None:
        """Forget everything, at the end of a step."""
        self._frames.clear()
        self._visits.clear()


def run_forward(runtime: Runtime, request: Any, task: RunningTask) -> None:
    """Run a module forward for another rank, answer, and keep the frame if a gradient may come back."""
    placement = runtime.placement(request.model)
    placement.wait_until_placed()
    module = placement.module_of(request.module)
    name = placement.name_of(request.module)
    frame = Frame(request.microbatch, request.id, request.requester, f"module {name!r}")
    frame.spanning = placement.is_divided(module)
    given = _cut_arguments(frame, request, name)
    args, kwargs, sharing = request.spec.build(given, registry)
    arguments = Arguments(name, given, (args, kwargs), sharing)
    state = TaskState(request.grad_mode, request.inference_mode, request.autocast)
    with state.applied():
        with in_frame(frame):
            result = _execute(module, request, args, kwargs)
        frame.settle()
        arguments.check_containers()
        _, results = _core.flatten((result, None), registry)
        returned = describe_results(results, arguments)
        spec, tensors = _core.flatten((result, returned.as_value(arguments)), registry)
    needs = [tensor.requires_grad and index not in returned.recipes for index, tensor in enumerate(tensors)]
    if any(needs):
        frame.results = [(get_gradient_edge(t), i) for i, t in enumerate(tensors) if needs[i]]
        runtime.frames.keep((request.requester, request.id), frame)
        runtime.frames.visit(request.model, request.module, request.microbatch)
    elif frame.calls:
        close_calls(frame, ServerBackward(task, frame))
    sent = [t.new_empty(0) if i in returned.recipes else t for i, t in enumerate(tensors)]
    runtime.server.respond(request, spec, pack(sent, needs))


def _cut_arguments(frame: Frame, request: Any, name: str) -> list[torch.Tensor]:
    given = unpack(request.parts)
    for index in range(len(given)):
        if request.parts.meta(index)[4]:
            given[index], slot = cut(given[index], f"an argument of module {name!r}")
            frame.inputs.append((slot, index))
    return given


def _execute(module: nn.Module, request: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if request.range is not None:
        start, end = request.range
        (value,) = args
        for child in list(module.children())[start:end]:
            value = checkpoint(child, value, use_reentrant=False) if request.checkpointing else child(value)
        return value
    if request.checkpointing:
        return checkpoint(module, *args, use_reentrant=False, **kwargs)
    return module(*args, **kwargs)


def run_request_backward(runtime: Runtime, request: Any, task: RunningTask) -> None:
    """Run the backward of an earlier forward request and answer with its arguments' gradients."""
    frame = runtime.frames.take((request.requester, request.forward))
    frame.retain_graph = runtime.frames.visited_again(request.model, request.module, request.microbatch)
    gradients = dict(request.spec.build(unpack(request.parts), registry))
    roots = [(edge, gradients.pop(index)) for edge, index in frame.results if index in gradients]
    frame.results = []
    remote = ServerBackward(task, frame)
    run_backward(frame, roots, remote)
    close_calls(frame, remote)
    answer = [(index, gradient) for slot, index in frame.inputs if (gradient := slot.take()) is not None]
    frame.inputs = []
    spec, tensors = _core.flatten(answer, registry)
    runtime.server.respond(request, spec, pack(tensors, [False] * len(tensors)))


def run_close(runtime: Runtime, request: Any, task: RunningTask) -> None:
    """Forget an earlier forward that no gradient reached, and whatever it called itself."""
    frame = runtime.frames.take((request.requester, request.forward))
    for slot, _ in frame.inputs:
        slot.take()
    close_calls(frame, ServerBackward(task, frame))
    spec, _ = _core.flatten(None, registry)
    runtime.server.respond(request, spec, pack([], []))
