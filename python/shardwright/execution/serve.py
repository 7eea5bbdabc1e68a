"""The executing side of a request: forward, backward, close."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwright import _core
from shardwright.execution import process
from shardwright.execution.backward import ServerBackward, ThenBackward
from shardwright.execution.call import Then
from shardwright.execution.checkpointed import run_checkpointed
from shardwright.execution.context import TaskState, as_carried
from shardwright.execution.exchange import Arguments, Returned, describe_results, sharing_of
from shardwright.execution.frame_table import FrameTable
from shardwright.execution.hooked_views import refuse_other_uses
from shardwright.execution.layout import restride
from shardwright.execution.placed import placed_model
from shardwright.execution.reproducible import microbatch_seed
from shardwright.execution.results import finish
from shardwright.execution.sparse import received_arguments, take_apart, watched_in
from shardwright.execution.state_order import splits_backward
from shardwright.execution.task import RunningTask
from shardwright.frames import Frame, Leaves, WeightGradients, cut, edge_of, in_frame, run_backward
from shardwright.frames.remote import bring_all
from shardwright.frames.watch import TensorMemory, Watched
from shardwright.huggingface import collector
from shardwright.job.received import build
from shardwright.values import decode, encode, pack, registry, unpack

if TYPE_CHECKING:
    from shardwright.job.runtime import Runtime


@dataclass(slots=True)
class _Sent:
    """A tensor that crossed: does anything on this rank keep its memory after the call?"""

    name: str
    number: int
    memory: TensorMemory
    watched: Watched | None

    @staticmethod
    def of(name: str, number: int, tensor: torch.Tensor, module: str) -> _Sent:
        why = f"module {module!r} kept a tensor that it was given or returned"
        return _Sent(name, number, TensorMemory(tensor), None if tensor.is_inference() else Watched(tensor, why))


def root_frame(task: RunningTask) -> Frame:
    """The frame of the step function for the task's microbatch; its random numbers start here."""
    process.seed(microbatch_seed(task.runtime, task.state.seed, task.microbatch))
    return Frame(task.microbatch, leaves=task.runtime[Leaves])


def run_forward(runtime: Runtime, request: Any, task: RunningTask) -> None:
    """Run a module forward for another rank, answer, and keep the frame if a gradient may come back."""
    placement = placed_model(runtime, request.model)
    placement.wait_until_placed(task)
    module = placement.module_of(request.module)
    name = placement.name_of(request.module)
    frame = Frame(request.microbatch, request.id, request.requester, f"module {name!r}", leaves=runtime[Leaves])
    frame.spanning = placement.is_divided(module)
    frame.executed = _executed(module, request)
    tree_spec, extras_spec = request.spec.split()
    extras: dict[str, Any] = extras_spec.build([], registry)
    then = [Then(*one) for one in extras.get("then", ())]
    if "stopped" in extras:  # the rank before has sent its result to the caller, who goes on from there
        runtime.server.ends_with_forward(task.worker)
        _stop(runtime, request, task, then)
        _respond(runtime, request, None, {"stopped": True})
        return
    spec, parts, returned, sent, lone = _forward(runtime, module, name, frame, request, tree_spec, extras)
    if task.ordered:
        returned["ordered"] = True
    if placement.kept is not None:
        placement.kept.check(task, module)
    finish(task)
    # The tensors are gone now, unless autograd or the module keeps them.
    for one in sent:
        if one.memory.lives or frame.elsewhere.keeps(one.memory.id):
            returned.setdefault(one.name, []).append(one.number)
            if one.watched is not None:
                runtime[FrameTable].watch(request.microbatch, one.watched)
    if "private" in extras:
        returned.pop("kept_arguments", None)  # nobody else has them
    runtime[FrameTable].settle(request.microbatch)
    if frame.answers or frame.calls or frame.inputs_live():
        returned["open"] = True
        runtime[FrameTable].keep((request.requester, request.id), frame)
    else:
        runtime.server.ends_with_forward(task.worker)
    if frame.hooked:
        returned["hooked"] = True
    if lone is None:
        _stop(runtime, request, task, then)
        _respond(runtime, request, (spec, parts), returned)
    else:
        argument_spec, following = lone
        kept = returned.pop("kept_results", None)
        if kept:
            following["kept"] = kept
        _pass_on(runtime, request, task, then, argument_spec, parts, following)
        _respond(runtime, request, None, returned | {"passed": True})


def _respond(runtime: Runtime, request: Any, result: tuple[Any, Any] | None, returned: dict[str, Any]) -> None:
    spec, parts = result or (_core.flatten(None, registry)[0], pack([], []))
    returned_spec, _ = _core.flatten(returned or None, registry)
    runtime.server.respond(request, _core.Spec.join([spec, returned_spec]), parts)


def _stop(runtime: Runtime, request: Any, task: RunningTask, then: list[Then]) -> None:
    """Tell the ranks that follow in a chain, if any do, that they get nothing."""
    if then:
        _pass_on(runtime, request, task, then, _core.flatten(None, registry)[0], pack([], []), {"stopped": True})


def _pass_on(
    runtime: Runtime,
    request: Any,
    task: RunningTask,
    then: list[Then],
    argument_spec: Any,
    parts: Any,
    extras: dict[str, Any],
) -> None:
    """Send the next request of a chain in the name of its first caller."""
    following, *rest = then
    extras |= {"seed": following.seed}
    if rest:
        extras["then"] = [tuple(one) for one in rest]
    extras_spec, _ = _core.flatten(extras, registry)
    runtime.server.send_request_for(
        task.worker,
        request,
        id=following.request,
        to=following.rank,
        kind="forward",
        module=following.module,
        range=following.children,
        call=following.number,
        spec=_core.Spec.join([argument_spec, extras_spec]),
        parts=parts,
    )


def _forward(
    runtime: Runtime,
    module: nn.Module,
    name: str,
    frame: Frame,
    request: Any,
    tree_spec: Any,
    extras: dict[str, Any],
) -> tuple[Any, Any, dict[str, Any], list[_Sent], tuple[Any, dict[str, Any]] | None]:
    given = _cut_arguments(frame, request, name, extras.get("strides", {}))
    whole, watched = received_arguments(frame, name, given, extras.get("sparse", {}))
    args, kwargs = build(runtime, request.requester, tree_spec, whole)
    arguments = Arguments(name, given, (args, *kwargs.values()), extras)
    frame.place = extras["seed"]
    process.seed(frame.place)
    state = TaskState(request.grad_mode, request.inference_mode, request.autocast)
    with state.applied(), as_carried(extras):
        with in_frame(frame), collector.executing(extras.get("collector")) as additions:
            result = _execute(frame.executed, request, args, kwargs, hooks=extras.get("hooks", True))
        frame.settle()
        arguments.check_containers()
        added = additions()
        spec, results = _core.flatten((result, added), registry, [f"the result of {name}", "collected outputs"])
        results = bring_all(results)
        for one in watched:
            one.check(request.microbatch)
        returned_whole = results
        results, sparse = take_apart(returned_whole, f"the result of module {name!r}", whole)
        if sparse:
            watched += watched_in(returned_whole, f"module {name!r} returned a sparse or nested tensor to another rank")
        for one in watched:
            runtime[FrameTable].watch(request.microbatch, one)
        returned = describe_results(frame, results, arguments)
        lone = None
        if "then" in extras and added is None and not sparse and returned.is_plain(len(results)):
            argument_spec, _ = _core.flatten(((result,), {}), registry)
            carried = {key: extras[key] for key in ("settings", "thread", "device") if key in extras}
            lone = argument_spec, sharing_of(results) | carried | {"private": True}
    for place, tensor in enumerate(returned.tensors):
        if returned.needs[place]:
            frame.answers = True
            edge = edge_of(tensor)
            if edge is not None:
                frame.results.append((edge, place))
                frame.hooked |= tensor.grad_fn in frame.hooked_elsewhere
            else:
                returned.dropped.append(place)
    if "hooked_views" in extras:
        refuse_other_uses(name, frame, extras["hooked_views"], [index for index, _ in returned.written])
    said = returned.as_value() | ({"sparse": sparse} if sparse else {})
    if lone is not None:  # how results lie is told to the next rank
        said.pop("strides", None)
    return spec, _pack(returned), said, _sent(name, given, returned), lone


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


def _executed(module: nn.Module, request: Any) -> list[nn.Module]:
    """What a request runs: a module, or some consecutive children of an ``nn.Sequential``."""
    if request.range is None:
        return [module]
    start, end = request.range
    return [child for child in list(module._modules.values())[start:end] if child is not None]


def _execute(
    modules: list[nn.Module], request: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, hooks: bool
) -> Any:
    value = None
    for module in modules:
        run: Callable[..., Any] = module
        if not hooks:
            run = module.forward
        elif request.range is None:
            run = MethodType(nn.Module.__call__, module)  # a `__call__` of its class has been run by the caller
        if request.checkpointing:
            run = partial(_without_own_checkpoint, module, run)
            value = run_checkpointed(module, run, args, kwargs)
        else:
            value = run(*args, **kwargs)
        args, kwargs = (value,), {}
    return value


def _without_own_checkpoint(module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a layer of ``transformers`` without its own checkpoint, which would have it computed three times."""
    if not getattr(module, "gradient_checkpointing", False):
        return run(*args, **kwargs)
    attributes = vars(module)  # not through the watch of what forwards set
    attributes["gradient_checkpointing"] = False
    try:
        return run(*args, **kwargs)
    finally:
        attributes["gradient_checkpointing"] = True


def run_request_backward(runtime: Runtime, request: Any, task: RunningTask) -> None:
    """Run the backward of an earlier forward request and answer with its arguments' gradients.

    A request to close, which no gradient reached, is one without gradients: a later call of the module may still have
    brought some to this one, through state that the module carried from the one to the other.
    """
    frame = runtime[FrameTable].take((request.requester, request.forward))
    task.place = frame.place
    runtime[FrameTable].settle(request.microbatch)
    runtime[FrameTable].forget_watched(request.microbatch)
    # State that modules hand on past arguments and results may lead from one frame's graph into another's.
    frame.retain_graph = placed_model(runtime, request.model).one_at_a_time or runtime[FrameTable].visited_again(frame)
    received, then = decode(request.spec, request.parts)
    gradients = dict(received)
    roots = [(edge, gradients.pop(index)) for edge, index in frame.results if index in gradients]
    frame.results = []
    run_backward(frame, roots, ServerBackward(task, frame), close=True, defer=deferring(task))
    answer = [(index, gradient) for slot, index in frame.inputs if (gradient := slot.take()) is not None]
    frame.inputs = []
    placement = placed_model(runtime, request.model)
    if placement.kept is not None:
        placement.kept.check(task, placement.module_of(request.module))
    if not then:
        runtime.server.respond(request, *encode(answer))
        return
    following, *rest = (ThenBackward(*one) for one in then)
    if following.indices is not None:
        results = dict(following.indices)
        answer = [(results[index], gradient) for index, gradient in answer]
    spec, parts = encode((answer, [tuple(one) for one in rest]))
    runtime.server.send_request_for(
        task.worker,
        request,
        id=following.request,
        to=following.rank,
        kind="backward" if answer else "close",
        module=following.module,
        forward=following.forward,
        call=following.number,
        spec=spec,
        parts=parts,
    )
    runtime.server.respond(request, *encode(None))


def deferring(task: RunningTask) -> Callable[[WeightGradients], None] | None:
    """Takes weights' gradients that a task's backward leaves for later; None where the schedule has none left."""
    runtime = task.runtime
    if not splits_backward(runtime):
        return None

    def defer(left: WeightGradients) -> None:
        runtime.server.defer_weight_gradient(task.worker, runtime[FrameTable].leave(left, task.place))

    return defer


def run_weight_gradients(runtime: Runtime, token: int, task: RunningTask) -> None:
    """Compute weights' gradients that a backward has left."""
    left, task.place = runtime[FrameTable].take_left(token)
    left.run()
