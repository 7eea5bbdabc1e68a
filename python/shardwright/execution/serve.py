"""The executing rank's side of requests: forward, backward and close."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwright import _core
from shardwright.activation_checkpointing.interception import execute
from shardwright.execution import cached, process
from shardwright.execution.backward import ServerBackward
from shardwright.execution.context import as_carried
from shardwright.execution.exchange import Arguments, Returned, describe_results, sharing_of
from shardwright.execution.executed import Executed
from shardwright.execution.frame_table import FrameTable
from shardwright.execution.gradients import pack_gradients, unpack_gradients
from shardwright.execution.hooked_views import refuse_other_uses
from shardwright.execution.layout import layouts_of, restride
from shardwright.execution.placed import placed_model
from shardwright.execution.reproducible import microbatch_seed
from shardwright.execution.results import finish
from shardwright.execution.sparse import received_arguments, watched_in
from shardwright.execution.state_order import splits_backward
from shardwright.execution.task import RunningTask
from shardwright.frames import Frame, Leaves, WeightGradients, cut, edge_of, in_frame, run_backward
from shardwright.frames.checkpointing import Checkpointing
from shardwright.frames.remote import bring_all
from shardwright.job.received import build
from shardwright.transformers_models import collector, switching
from shardwright.values import pack, registry, unpack

if TYPE_CHECKING:
    from shardwright.job.runtime import Runtime


def root_frame(task: RunningTask) -> Frame:
    """Return the frame of the step function for the task's microbatch, and seed its random numbers."""
    process.seed(microbatch_seed(task.runtime, task.state.seed, task.microbatch))
    return Frame(task.microbatch, leaves=task.runtime[Leaves])


def run_forward(runtime: Runtime, request: _core.Request, task: RunningTask) -> None:
    """Run the forward of a module for another rank, answer, and keep the frame if a gradient may come back."""
    call = request.forward
    placement = placed_model(runtime, request.model)
    placement.wait_until_placed(task)
    module = placement.module_of(call.module)
    name = placement.name_of(call.module)
    frame = Frame(request.microbatch, request.id, request.requester, f"module {name!r}", leaves=runtime[Leaves])
    frame.spanning = placement.is_divided(module)
    frame.executed = _executed(module, call.range)
    if call.is_stopped:  # the previous rank has sent its result to the caller, which continues from there
        runtime.server.ends_with_forward(task.worker)
        _stop(runtime, request, call, task)
        runtime.server.respond(request, _core.Answer.stopped())
        return
    executed = _forward(runtime, name, frame, request, call)
    if placement.kept is not None:
        placement.kept.check(task, module)
    finish(task)
    frames = runtime[FrameTable]
    # The tensors have been freed, unless autograd or the module keeps them.
    for watched in executed.settle(name, frame.elsewhere):
        frames.watch(request.microbatch, watched)
    notes = executed.notes
    if call.notes.private:
        notes.pop("kept_arguments", None)  # no other rank has them
    frames.settle(request.microbatch)
    # The ranks of a tensor-parallel group must agree, and graphs in reference cycles are collected at any time.
    inputs_live = frame.inputs_live() if len(runtime.place.tp_ranks) == 1 else bool(frame.inputs)
    is_open = bool(frame.answers or frame.calls or inputs_live)
    if is_open:
        frames.keep((request.requester, request.id), frame)
    else:
        runtime.server.ends_with_forward(task.worker)
    left: dict[str, Any] = {"open": is_open, "hooked": frame.hooked, "ordered": task.ordered}
    if executed.onward is None:
        _stop(runtime, request, call, task)
        answer = _core.Answer.result(executed.spec, executed.parts, _core.ResultNotes(**notes, **left))
    else:
        spec, said = executed.onward
        following = call.next(_core.ArgumentNotes(**said, private=True, kept=notes.get("kept_results", [])))
        assert following is not None, "results go on in chains"
        _pass_on(runtime, request, task, following, spec, executed.parts)
        answer = _core.Answer.passed_on(_core.ResultNotes(kept_arguments=notes.get("kept_arguments", []), **left))
    runtime.server.respond(request, answer)


def _stop(runtime: Runtime, request: _core.Request, call: _core.ForwardCall, task: RunningTask) -> None:
    """Stop the chain: send the following ranks, if there are any, a request without a result."""
    following = call.next_stopped()
    if following is not None:
        _pass_on(runtime, request, task, following, _core.flatten(None, registry)[0], _core.TensorParts())


def _pass_on(
    runtime: Runtime,
    request: _core.Request,
    task: RunningTask,
    following: tuple[_core.ForwardLink, _core.ForwardCall],
    spec: _core.Spec,
    parts: _core.TensorParts,
) -> None:
    """Send the next request of a chain on behalf of the rank that started the chain."""
    runtime.server.send_forward_for(task.worker, request, *following, spec, parts)


def _forward(runtime: Runtime, name: str, frame: Frame, request: _core.Request, call: _core.ForwardCall) -> Executed:
    notes, context = call.notes, call.context
    given = _cut_arguments(frame, request.parts, name, notes.strides)
    whole, watched = received_arguments(frame, name, given, notes.composites)
    args, kwargs = build(runtime, request.requester, request.spec, whole)
    containers: tuple[Any, ...] = ()
    entered = None
    if request.spec.holds_containers:
        args, kwargs, entered = cached.incoming(runtime, request.requester, args, kwargs)
        containers = (args, *kwargs.values()) if entered is None else cached.without_caches(args, kwargs)
    arguments = Arguments(name, given, containers, notes)
    frame.place = call.seed
    process.seed(frame.place)
    with as_carried(context):
        with (
            in_frame(frame),
            collector.executing(context.collector) as additions,
            switching.received(kwargs) as kwargs,
        ):
            result = _execute(frame.executed, call.range, context, args, kwargs)
        frame.settle()
        arguments.check_containers()
        added: Any = additions()
        if entered is not None:
            result, added = cached.answered(runtime, request.requester, result, added, entered)
        both, results = _core.flatten((result, added), registry, [f"the result of {name}", "collected outputs"])
        spec, collected = both.split()
        results = bring_all(results)
        for one in watched:
            one.check(request.microbatch)
        returned = describe_results(frame, results, arguments, whole)
        if "composites" in returned.notes:
            watched += watched_in(results, f"module {name!r} returned a sparse or nested tensor to another rank")
        for one in watched:
            runtime[FrameTable].watch(request.microbatch, one)
        onward = None
        is_plain = returned.notes.keys() <= {"strides"} and len(returned.tensors) == len(results)
        if call.is_followed and added is None and is_plain:
            argument_spec, _ = _core.flatten(((result,), {}), registry)
            onward = argument_spec, {"shared": sharing_of(results), **layouts_of(results)}
        if added is not None:
            returned.notes["collected"] = collected
    _add_edges(frame, returned)
    if hooked_views := notes.hooked_views:
        written = [index for index, _ in returned.notes.get("written", ())]
        refuse_other_uses(name, frame, hooked_views, written)
    return _packed(spec, given, returned, onward)


def _cut_arguments(
    frame: Frame, parts: _core.TensorParts, name: str, strides: list[tuple[int, list[int]]]
) -> list[torch.Tensor]:
    given = unpack(parts)
    for index, layout in strides:
        given[index] = restride(given[index], layout)
    for index, need in enumerate(parts.needs()):
        if need:
            given[index], slot = cut(given[index], "an argument of module", name)
            frame.inputs.append((slot, index))
        frame.arguments.append(weakref.ref(given[index]))
    return given


def _add_edges(frame: Frame, returned: Returned) -> None:
    """Record where the gradients of the results enter the frame's graph."""
    for place, tensor in enumerate(returned.tensors):
        if not returned.needs[place]:
            continue
        frame.answers = True
        edge = edge_of(tensor)
        if edge is None:
            returned.note("dropped", [place])
            continue
        frame.results.append((edge, place))
        if frame.hooked_elsewhere:
            frame.hooked |= tensor.grad_fn in frame.hooked_elsewhere


def _packed(
    spec: _core.Spec,
    given: list[torch.Tensor],
    returned: Returned,
    onward: tuple[_core.Spec, dict[str, Any]] | None,
) -> Executed:
    tensors, recipes = returned.tensors, returned.recipes
    parts = pack([t.new_empty(0) if i in recipes else t for i, t in enumerate(tensors)], returned.needs)
    sent = [place for place in range(len(tensors)) if place not in recipes]
    aliases = _core.detached([*given, *[tensors[place] for place in sent]])
    return Executed(spec, parts, returned.notes, aliases, sent, onward)


def _executed(module: nn.Module, children: tuple[int, int] | None) -> list[nn.Module]:
    """Return the modules that a request runs: one module, or consecutive children of an ``nn.Sequential``."""
    if children is None:
        return [module]
    start, end = children
    return [child for child in list(module._modules.values())[start:end] if child is not None]


def _execute(
    modules: list[nn.Module],
    children: tuple[int, int] | None,
    context: _core.TorchContext,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    checkpointing = context.checkpointing

    def call_of(module: nn.Module) -> Callable[..., Any]:
        run: Callable[..., Any] = module
        if not context.hooks:
            run = module.forward
        elif children is None:
            run = MethodType(nn.Module.__call__, module)  # the caller has run the `__call__` of a subclass
        return run if checkpointing is None else partial(_without_own_checkpoint, module, run)

    if checkpointing is not None:
        return execute(modules, call_of, Checkpointing(*checkpointing), args, kwargs)
    value = None
    for module in modules:
        value = call_of(module)(*args, **kwargs)
        args, kwargs = (value,), {}
    return value


def _without_own_checkpoint(module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a layer of ``transformers`` without its own checkpoint, which would make it run three times."""
    if not getattr(module, "gradient_checkpointing", False):
        return run(*args, **kwargs)
    attributes = vars(module)  # bypasses the detection of attributes that forwards set
    attributes["gradient_checkpointing"] = False
    try:
        return run(*args, **kwargs)
    finally:
        attributes["gradient_checkpointing"] = True


def run_request_backward(runtime: Runtime, request: _core.Request, task: RunningTask) -> None:
    """Run the backward of an earlier forward request and answer with the gradients of its arguments.

    A request to close is a backward without gradients. It still runs, because a later call of the module may have
    passed gradients to this one through state that the module keeps between the calls.
    """
    call = request.backward
    frame = runtime[FrameTable].take((request.requester, call.forward))
    task.place = frame.place
    runtime[FrameTable].settle(request.microbatch)
    runtime[FrameTable].forget_watched(request.microbatch)
    # State that modules keep between calls may connect the graph of one frame with that of another.
    frame.retain_graph = placed_model(runtime, request.model).one_at_a_time or runtime[FrameTable].visited_again(frame)
    gradients = dict(unpack_gradients(call.gradients, request.parts))
    roots = [(edge, gradients.pop(index)) for edge, index in frame.results if index in gradients]
    frame.results = []
    run_backward(frame, roots, ServerBackward(task, frame), close=True, defer=deferring(task))
    answer = [(index, gradient) for slot, index in frame.inputs if (gradient := slot.take()) is not None]
    frame.inputs = []
    placement = placed_model(runtime, request.model)
    if placement.kept is not None:
        placement.kept.check(task, placement.module_of(call.module))
    pairs, parts = pack_gradients(answer)
    following = call.next(pairs)
    if following is None:
        runtime.server.respond(request, _core.Answer.of_gradients(pairs, parts))
        return
    runtime.server.send_backward_for(task.worker, request, *following, parts)
    runtime.server.respond(request, _core.Answer.done())


def deferring(task: RunningTask) -> Callable[[WeightGradients], None] | None:
    """Return a function that defers the weight gradients of a task's backward; None if they are not deferred."""
    runtime = task.runtime
    if not splits_backward(runtime, task.microbatch):
        return None

    def defer(left: WeightGradients) -> None:
        runtime[FrameTable].leave(runtime.server.defer_weight_gradient(task.worker), left, task.place)

    return defer


def run_weight_gradients(runtime: Runtime, token: int, task: RunningTask) -> None:
    """Compute weight gradients that a backward has deferred."""
    left, task.place = runtime[FrameTable].take_left(token)
    left.run()
