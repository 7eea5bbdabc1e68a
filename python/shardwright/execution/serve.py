"""The executing side of a request: forward, backward, close."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright import _core
from shardwright.execution import process
from shardwright.execution.call import ServerBackward
from shardwright.execution.context import TaskState, as_carried
from shardwright.execution.exchange import Arguments, Returned, describe_results
from shardwright.execution.layout import restride
from shardwright.execution.task import RunningTask
from shardwright.frames import Frame, cut, edge_of, in_frame, run_backward
from shardwright.frames.watch import Memory, Watched
from shardwright.huggingface import collector
from shardwright.values import build, decode, encode, pack, registry, unpack

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
        self._watched: dict[int, list[Watched]] = {}

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

    def watch(self, microbatch: int, watched: Watched) -> None:
        """Refuse writes to a tensor of which the requester has a copy, until the microbatch's backward."""
        self._watched.setdefault(microbatch, []).append(watched)

    def settle(self, microbatch: int) -> None:
        """Raise :class:`FrameError` if a watched tensor of the microbatch was written to."""
        for watched in self._watched.get(microbatch, ()):
            watched.check(microbatch)

    def forget_watched(self, microbatch: int) -> None:
        """Stop watching: the microbatch's backward has begun."""
        self._watched.pop(microbatch, None)

    def clear(self) -> None:
        """Forget everything, at the end of a step."""
        self._frames.clear()
        self._visits.clear()
        self._watched.clear()


@dataclass(slots=True)
class _Sent:
    """A tensor that crossed: does anything on this rank keep its memory after the call?"""

    name: str
    number: int
    memory: Memory
    watched: Watched | None

    @staticmethod
    def of(name: str, number: int, tensor: torch.Tensor, module: str) -> _Sent:
        why = f"module {module!r} kept a tensor that it was given or returned"
        return _Sent(name, number, Memory(tensor), None if tensor.is_inference() else Watched(tensor, why))


def root_frame(task: RunningTask) -> Frame:
    """The frame of the step function for the task's microbatch; its random numbers start here."""
    process.seed(task.runtime.microbatch_seed(task.state.seed, task.microbatch))
    return Frame(task.microbatch, leaves=task.runtime.leaves)


def run_forward(runtime: Runtime, request: Any, task: RunningTask) -> None:
    """Run a module forward for another rank, answer, and keep the frame if a gradient may come back."""
    placement = runtime.placement(request.model)
    placement.wait_until_placed(task)
    module = placement.module_of(request.module)
    name = placement.name_of(request.module)
    frame = Frame(request.microbatch, request.id, request.requester, f"module {name!r}", leaves=runtime.leaves)
    frame.spanning = placement.is_divided(module)
    spec, parts, returned, sent = _forward(runtime, module, name, frame, request)
    # The tensors are gone now, unless autograd or the module keeps them.
    for one in sent:
        if one.memory.lives or frame.elsewhere.keeps(one.memory.id):
            returned.setdefault(one.name, []).append(one.number)
            if one.watched is not None:
                runtime.frames.watch(request.microbatch, one.watched)
    runtime.frames.settle(request.microbatch)
    if frame.answers or frame.calls or frame.inputs_live():
        returned["open"] = True
        runtime.frames.keep((request.requester, request.id), frame)
        runtime.frames.visit(request.model, request.module, request.microbatch)
    if frame.hooked:
        returned["hooked"] = True
    returned_spec, _ = _core.flatten(returned or None, registry)
    runtime.server.respond(request, _core.Spec.join([spec, returned_spec]), parts)


def _forward(
    runtime: Runtime, module: nn.Module, name: str, frame: Frame, request: Any
) -> tuple[Any, Any, dict[str, Any], list[_Sent]]:
    tree_spec, extras_spec = request.spec.split()
    extras: dict[str, Any] = extras_spec.build([], registry)
    given = _cut_arguments(frame, request, name, extras.get("strides", {}))
    args, kwargs = build(runtime, request.requester, tree_spec, given)
    arguments = Arguments(name, given, (args, kwargs), extras)
    frame.place = extras["seed"]
    process.seed(frame.place)
    state = TaskState(request.grad_mode, request.inference_mode, request.autocast)
    with state.applied(), as_carried(extras):
        with in_frame(frame), collector.executing(extras.get("collector")) as additions:
            result = _execute(module, request, args, kwargs)
        frame.settle()
        arguments.check_containers()
        spec, results = _core.flatten((result, additions()), registry, [f"the result of {name}", "collected outputs"])
        returned = describe_results(frame, results, arguments)
    for place, tensor in enumerate(returned.tensors):
        if returned.needs[place]:
            frame.answers = True
            edge = edge_of(tensor)
            if edge is not None:
                frame.results.append((edge, place))
                frame.hooked |= tensor.grad_fn in frame.hooked_elsewhere
            else:
                returned.dropped.append(place)
    return spec, _pack(returned), returned.as_value(), _sent(name, given, returned)


def _cut_arguments(frame: Frame, request: Any, name: str, strides: dict[int, list[int]]) -> list[torch.Tensor]:
    given = unpack(request.parts)
    for index, layout in strides.items():
        given[index] = restride(given[index], layout)
    for index in range(len(given)):
        if request.parts.meta(index)[4]:
            given[index], slot = cut(given[index], f"an argument of module {name!r}")
            frame.inputs.append((slot, index))
        frame.arguments.append(weakref.ref(given[index]))
    return given


def _pack(returned: Returned) -> Any:
    sent = [t.new_empty(0) if i in returned.recipes else t for i, t in enumerate(returned.tensors)]
    return pack(sent, returned.needs)


def _sent(name: str, given: list[torch.Tensor], returned: Returned) -> list[_Sent]:
    sent = [_Sent.of("kept_arguments", index, tensor, name) for index, tensor in enumerate(given)]
    for place, tensor in enumerate(returned.tensors):
        if place not in returned.recipes:
            sent.append(_Sent.of("kept_results", place, tensor, name))
    return sent


def _execute(module: nn.Module, request: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if request.range is not None:
        start, end = request.range
        (value,) = args
        for child in list(module._modules.values())[start:end]:
            assert child is not None, "an nn.Sequential holds modules only"
            value = _execute_one(child, request, (value,), {})
        return value
    return _execute_one(module, request, args, kwargs)


def _execute_one(module: nn.Module, request: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not request.checkpointing:
        return module(*args, **kwargs)
    return checkpoint(MethodType(_without_own_checkpoint, module), *args, use_reentrant=False, **kwargs)


def _without_own_checkpoint(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a layer of ``transformers`` without its own checkpoint, which would have it computed three times."""
    if not getattr(module, "gradient_checkpointing", False):
        return module(*args, **kwargs)
    setattr(module, "gradient_checkpointing", False)  # noqa: B010
    try:
        return module(*args, **kwargs)
    finally:
        setattr(module, "gradient_checkpointing", True)  # noqa: B010


def run_request_backward(runtime: Runtime, request: Any, task: RunningTask) -> None:
    """Run the backward of an earlier forward request and answer with its arguments' gradients.

    A request to close, which no gradient reached, is one without gradients: a later call of the module may still have
    brought some to this one, through state that the module carried from the one to the other.
    """
    frame = runtime.frames.take((request.requester, request.forward))
    task.place = frame.place
    runtime.frames.settle(request.microbatch)
    runtime.frames.forget_watched(request.microbatch)
    # State that modules hand on past arguments and results may lead from one frame's graph into another's.
    frame.retain_graph = runtime.placement(request.model).one_at_a_time or runtime.frames.visited_again(
        request.model, request.module, request.microbatch
    )
    gradients = dict(decode(request.spec, request.parts) or ())
    roots = [(edge, gradients.pop(index)) for edge, index in frame.results if index in gradients]
    frame.results = []
    run_backward(frame, roots, ServerBackward(task, frame), close=True)
    answer = [(index, gradient) for slot, index in frame.inputs if (gradient := slot.take()) is not None]
    frame.inputs = []
    runtime.server.respond(request, *encode(answer))
