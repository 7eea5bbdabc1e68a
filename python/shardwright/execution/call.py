"""The requester's side of a remote call: send the arguments, receive the results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.nn.utils import parametrize

from shardwright import _core
from shardwright.errors import FrameError, UnsupportedValueError
from shardwright.execution import forward_mode, reproducible
from shardwright.execution.context import Suspended, context_of, saved_tensor_hooks_are_set
from shardwright.execution.exchange import past_views, rebuild_results, sharing_of
from shardwright.execution.hooked_views import hooked_views
from shardwright.execution.layout import layouts_of
from shardwright.execution.placed import placed_model
from shardwright.execution.results import Response, origins_of, release_unused
from shardwright.execution.sparse import Composites, received_results, take_apart, watch_kept
from shardwright.execution.task import RunningTask, running_task
from shardwright.frames import Call, Frame, Passed, current_frame, edge_of
from shardwright.frames.remote import needs_gradient
from shardwright.job.received import build
from shardwright.transformers_models import collector, switching
from shardwright.transformers_models.adapter import refuse_cache
from shardwright.values import pack, registry


@dataclass(frozen=True, slots=True)
class RemoteModule:
    """A module that another rank owns.

    Attributes:
        name: The module's name in the model.
        module_id: The module's id in the model.
        model_id: The model's id.
        rank: The global rank that owns it.
        draws: The number of module calls with their own seed that a request for it makes; None if only requests have
            their own seed.
    """

    name: str
    module_id: int
    model_id: int
    rank: int
    draws: int | None = None

    def __str__(self) -> str:
        """Describe it, for error messages."""
        return f"module {self.name!r}, which rank {self.rank} owns,"

    def seed_at(self, seed: int) -> int:
        """Return the seed that a request sent at ``seed`` starts from; modules with their own seed derive it there."""
        return reproducible.within(seed) if self.draws is None else seed

    @property
    def passes(self) -> int:
        """The number of calls with their own seed that a request counts as."""
        return 1 if self.draws is None else self.draws


@dataclass(slots=True)
class CallWatch:
    """An observer of calls to other ranks.

    Attributes:
        on_call: Called with the module, its positional arguments, and the range of children of an ``nn.Sequential``;
            None if there is no observer.
    """

    on_call: Callable[[RemoteModule, Any, tuple[int, int] | None], None] | None = None


@dataclass(slots=True)
class _Given:
    """The arguments of a call as they are sent.

    Attributes:
        spec: Their structure.
        tensors: Their tensors, followed by the parts of sparse and nested ones.
        parts: The tensors' bytes.
        notes: What the executing rank cannot see of them.
        composites: The descriptions of sparse and nested tensors.
        inputs: The edges at which their gradients enter the graph, with the indices of the tensors.
    """

    spec: _core.Spec
    tensors: list[torch.Tensor]
    parts: _core.TensorParts
    notes: _core.ArgumentNotes
    composites: Composites
    inputs: list[tuple[GradientEdge, int]]


#: The argument notes of nearly every call.
_NOTHING = _core.ArgumentNotes()
#: A module and, for an ``nn.Sequential``, the range of children to run.
Link = tuple[RemoteModule, tuple[int, int] | None]


def call_remote(target: RemoteModule, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, hooks: bool = True) -> Any:
    """Run the forward of a module on the rank that owns it (the paper, 4.1) and return its result.

    Wait for the answer, unless it is predicted.

    Args:
        target: The module.
        args: Positional arguments.
        kwargs: Keyword arguments.
        hooks: Whether its hooks run too; False if the script calls ``forward`` directly.

    Raises:
        FrameError: The module is called where a remote call is not supported, for example outside a step.
        UnsupportedValueError: An argument is of a type that cannot cross ranks.
    """
    return _call([(target, None)], args, kwargs, hooks=hooks)[0]


def call_chain(links: Sequence[Link], value: Any) -> tuple[Any, int]:
    """Run parts of an ``nn.Sequential`` one after another; each rank sends its result directly to the next rank.

    If the caller must know how the result of a part relates to its argument (the result is a view of it, or the part
    wrote to it), the chain ends at that part and the result returns to the caller, which runs the remaining parts.

    Args:
        links: The parts, each on a different rank than the previous one.
        value: The argument of the first.

    Returns:
        The result of the last part that ran, and the number of parts that ran.
    """
    task = running_task()
    is_told = collector.outgoing() is not None or switching.are_switched()
    if task is not None and (task.runtime[CallWatch].on_call is not None or is_told):
        links = links[:1]  # the arguments of every call are observed, or each rank is told something with them
    return _call(links, (value,), {})


def _call(
    links: Sequence[Link], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, hooks: bool = True
) -> tuple[Any, int]:
    target, children = links[0]
    task, frame = _place_of(target)
    runtime = task.runtime
    release_unused(task)
    if (kept := placed_model(runtime, target.model_id).kept) is not None:
        kept.check_call(task, target.name)
    number = frame.next_call_number()
    if (watcher := runtime[CallWatch].on_call) is not None:
        watcher(target, args, children)
    given = _given(frame, target, args, switching.with_switches(kwargs))
    collected = collector.outgoing()
    context = context_of(target, task.state, checkpointing=frame.checkpointing, hooks=hooks, collector=collected)
    seed = reproducible.place()
    sites = runtime[_core.Sites]
    asked = [(link.module_id, range) for link, range in links]
    site = sites.site(task.module, number, target.model_id, asked, context)
    observed = collected is not None or watcher is not None or context.inference_mode
    description = _core.Description(given.spec, given.parts) if sites.learns and not observed else None
    predicted, held = sites.predict(site, description, observed=observed)
    chain: list[_core.ForwardLink] = []
    if len(links) > 1:
        chain = _announce(task, frame, links[1:], predicted, reproducible.behind(seed, target.passes))
    request = runtime.server.send_forward(
        task.worker,
        target.rank,
        _core.Place(model=target.model_id, microbatch=frame.microbatch, parent=frame.request, number=number),
        _core.ForwardCall(
            target.module_id, children, seed=target.seed_at(seed), notes=given.notes, context=context, chain=chain
        ),
        given.spec,
        given.parts,
        hold=held,
        expected=None if predicted is None else predicted[0],
    )
    requests = [request, *[link.request for link in chain]]
    answers: Sequence[_core.Answer | _core.Description] | None = predicted
    if answers is None:
        with Suspended():
            answers = received = runtime.server.wait(task.worker, requests, "forward")
        if description is not None:
            sites.learn(site, description, [answer.describe() for answer in received])
    call = Call(target.rank, target.name, target.module_id, target.model_id, request, number, given.inputs, [])
    response = Response(task, frame, site, requests, held=held, is_there=predicted is None)
    value, done = _receive_chain(response, call, links[1:], chain, answers, given)
    reproducible.pass_calls(seed, target.passes if done == 1 else sum(link.passes for link, _ in links[:done]))
    return value, done


def _given(frame: Frame, target: RemoteModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Given:
    try:
        spec, whole = _core.flatten((args, dict(kwargs)), registry, ["args", "kwargs"])
    except UnsupportedValueError:
        refuse_cache(target.name, target.rank, (args, kwargs))
        raise
    tensors, composites = take_apart(whole, f"an argument of module {target.name!r}")
    needs = [needs_gradient(tensor) for tensor in tensors]
    parts = pack(tensors, needs, origins_of(tensors))
    shared, layouts = sharing_of(tensors), layouts_of(tensors)
    inputs = [
        (edge, index) for index, tensor in enumerate(tensors) if needs[index] and (edge := edge_of(tensor)) is not None
    ]
    if composites:
        tensors = whole + tensors[len(whole) :]
    hooked = hooked_views(frame, tensors, inputs) if frame.guarded else []
    notes = _NOTHING
    if shared or layouts or composites or hooked:
        notes = _core.ArgumentNotes(shared=shared, composites=composites, hooked_views=hooked, **layouts)
    return _Given(spec, tensors, parts, notes, composites, inputs)


def _announce(
    task: RunningTask, frame: Frame, links: Sequence[Link], predicted: list[_core.Description] | None, seed: int
) -> list[_core.ForwardLink]:
    chain = []
    for place, (link, children) in enumerate(links, start=1):
        request = task.runtime.server.announce_forward(
            task.worker,
            to=link.rank,
            model=link.model_id,
            module=link.module_id,
            microbatch=frame.microbatch,
            expected=None if predicted is None else predicted[place],
        )
        chain.append(
            _core.ForwardLink(
                rank=link.rank,
                request=request,
                module=link.module_id,
                range=children,
                number=frame.next_call_number(),
                seed=link.seed_at(seed),
            )
        )
        seed = reproducible.behind(seed, link.passes)
    return chain


def _receive_chain(
    response: Response,
    call: Call,
    following: Sequence[Link],
    chain: list[_core.ForwardLink],
    answers: Sequence[_core.Answer | _core.Description],
    sent: _Given,
) -> tuple[Any, int]:
    """Process the answers of a chain of calls; return the result of the last call that ran, and how many ran."""
    frame, given = response.frame, sent.tensors
    for done, answer in enumerate(answers, start=1):
        notes = answer.notes
        if notes.ordered:
            response.in_order()
        if sent.composites and done == 1:
            watch_kept(frame, call.module, sent.composites, notes, given)
        if call.passed and not notes.open:
            frame.calls.append(_ending_before(call))
            call.passed, call.inputs = [], []
        if not answer.is_passed_on:
            response.answered(call, done - 1, answer)
            return _receive(response, call, answer, notes, given), done
        rebuild_results(frame, call.module, [], [], notes, given)
        (link, _), asked, before = following[done - 1], chain[done - 1], call
        call = Call(link.rank, link.name, link.module_id, link.model_id, asked.request, asked.number, [], [])
        if notes.open:
            passed = Passed(before.rank, before.module, before.module_id, before.request, before.number)
            call.inputs, call.passed = before.inputs, [*before.passed, passed]
        given = []
    raise AssertionError("the last of a chain has nobody to pass its result on to")


def _ending_before(call: Call) -> Call:
    """Return the calls of a chain that precede one without a frame, as one call to close: no gradient reaches them."""
    *passed, last = call.passed
    ending = Call(last.rank, last.module, last.module_id, call.model_id, last.request, last.number, call.inputs, [])
    ending.passed = passed
    return ending


def _place_of(target: RemoteModule) -> tuple[RunningTask, Frame]:
    """Return the task and the frame in which a module is called.

    Raises:
        FrameError: A remote call is not supported there.
    """
    task, frame = running_task(), current_frame()
    if task is None or frame is None:
        raise _outside(target, task)
    refuse_transforms(target)
    if saved_tensor_hooks_are_set():
        raise FrameError(
            f"{target} was called inside saved_tensors_hooks, which cannot cross ranks: use them inside one module"
        )
    if parametrize._cache_enabled:
        raise FrameError(
            f"{target} was called inside parametrize.cached(), whose cache is on one rank: the weights that it "
            "computes there would be computed anew at every use. Enter it inside one module, or place what it calls on "
            "one rank with smp.set_partition"
        )
    return task, frame


def _outside(target: RemoteModule, task: RunningTask | None) -> FrameError:
    """Return the error of a call outside the code of a frame."""
    if torch._C._current_graph_task_id() != -1:
        return FrameError(
            f"{target} was called during backward (a reentrant checkpoint or a reversible block around it): place "
            "the whole block on one rank with smp.set_partition"
        )
    from shardwright.job.runtime import find_runtime  # it imports this module

    runtime = find_runtime()
    if task is None and runtime is not None and runtime.step.running:
        return FrameError(
            f"{target} was called in thread {threading.current_thread().name!r}, and not in the thread that runs "
            "the microbatch: call modules in the thread in which the step function or the forward itself runs"
        )
    return FrameError(f"{target} was called outside a step: call the model inside a function decorated with smp.step")


def refuse_transforms(what: object) -> None:
    """Raise :class:`FrameError` under ``torch.func`` transforms and forward-mode differentiation."""
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_mode.is_entered():
        raise FrameError(
            f"{what} was called under a torch.func transform or forward-mode differentiation, which cannot cross "
            "ranks: apply it inside one module"
        )


def _receive(
    response: Response,
    call: Call,
    answer: _core.Answer | _core.Description,
    notes: _core.ResultNotes,
    given: list[torch.Tensor],
) -> Any:
    needs = answer.needs()
    received = response.tensors_of(answer, len(needs), may_stay=notes.may_stay)
    frame = response.frame
    if notes.open:
        frame.calls.append(call)
    if written := notes.written:
        call.inputs = past_views(call.inputs, given, {index for index, _ in written})
    tensors, call.results = rebuild_results(frame, call.module, received, needs, notes, given)
    if composites := notes.composites:
        tensors = received_results(frame, call.module, tensors, composites, given)
    result = build(response.runtime, call.rank, answer.spec, tensors)
    if (collected := notes.collected) is not None:
        collector.incoming(build(response.runtime, call.rank, collected, tensors))
    return result
