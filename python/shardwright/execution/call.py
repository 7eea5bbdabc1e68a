"""The requester's side of a remote call: arguments out, results back, gradients later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge
from torch.nn.utils import parametrize

from shardwright import _core
from shardwright.errors import FrameError, UnsupportedValueError
from shardwright.execution import reproducible
from shardwright.execution.context import TaskState, carried, saved_tensor_hooks_are_set, suspended
from shardwright.execution.exchange import rebuild_results, sharing_of
from shardwright.execution.task import RunningTask, running_task
from shardwright.frames import Call, Frame, current_frame, edge_of
from shardwright.huggingface import collector
from shardwright.huggingface.adapter import refuse_cache
from shardwright.values import build, decode, encode, pack, registry, unpack

if TYPE_CHECKING:
    from shardwright.runtime import Runtime


@dataclass(frozen=True, slots=True)
class RemoteModule:
    """A module that another rank owns.

    Attributes:
        name: Its name in the model.
        module_id: Its id in the model.
        model_id: The model.
        rank: The global rank that owns it.
        draws: How many module calls with seeds of their own a request for it makes; None where only requests have.
    """

    name: str
    module_id: int
    model_id: int
    rank: int
    draws: int | None = None

    def seed_at(self, seed: int) -> int:
        """The seed that a request made at ``seed`` starts from; modules with seeds of their own derive them there."""
        return reproducible.within(seed) if self.draws is None else seed


def call_remote(
    target: RemoteModule, args: tuple[Any, ...], kwargs: Mapping[str, Any], children: tuple[int, int] | None = None
) -> Any:
    """Have a module run forward on the rank that owns it (the paper, 4.1), and wait for its result.

    Args:
        target: The module.
        args: Positional arguments.
        kwargs: Keyword arguments.
        children: For an ``nn.Sequential``, the range of consecutive children to run.

    Raises:
        FrameError: The call stands where its backward could not be exact.
        UnsupportedValueError: An argument is of a type that cannot cross ranks.
    """
    task, frame = running_task(), current_frame()
    _check_place(target, task, frame)
    assert task is not None
    assert frame is not None
    number = frame.next_call_number()
    if task.runtime.watch_requests is not None:
        task.runtime.watch_requests(target, args, children)
    spec, given = _arguments(target, args, kwargs)
    extras = sharing_of(given) | carried(
        f"module {target.name!r}, which rank {target.rank} owns, was called", task.state.device, task.state.settings
    )
    seed = reproducible.place()
    extras["seed"] = target.seed_at(seed)
    wanted = collector.outgoing()
    if wanted is not None:
        extras["collector"] = wanted
    extras_spec, _ = _core.flatten(extras, registry)
    needs = [tensor.requires_grad for tensor in given]
    inputs: list[tuple[GradientEdge, int]] = [
        (edge, index) for index, tensor in enumerate(given) if needs[index] and (edge := edge_of(tensor)) is not None
    ]
    state = TaskState.capture()
    request = task.runtime.server.send_request(
        task.worker,
        to=target.rank,
        kind="forward",
        model=target.model_id,
        module=target.module_id,
        range=children,
        forward=None,
        control=None,
        microbatch=frame.microbatch,
        parent=frame.request,
        call=number,
        grad_mode=state.grad_mode,
        inference_mode=state.inference_mode,
        autocast=state.autocast,
        checkpointing=frame.checkpointing > 0,
        spec=_core.Spec.join([spec, extras_spec]),
        parts=pack(given, needs),
    )
    with suspended():
        [(spec, parts)] = task.runtime.server.wait(task.worker, [request], "forward")
    reproducible.pass_calls(seed, 1 if target.draws is None else target.draws)
    call = Call(target.rank, target.name, target.module_id, target.model_id, request, number, inputs, [])
    return _receive(task.runtime, frame, call, spec, parts, given)


def _arguments(
    target: RemoteModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, list[torch.Tensor]]:
    try:
        spec, given = _core.flatten((args, dict(kwargs)), registry, ["args", "kwargs"])
    except UnsupportedValueError:
        refuse_cache(target.name, target.rank, (args, kwargs))
        raise
    return spec, given


def _check_place(target: RemoteModule, task: RunningTask | None, frame: Frame | None) -> None:
    owned = f"module {target.name!r}, which rank {target.rank} owns,"
    if task is None or frame is None:
        if torch._C._current_graph_task_id() != -1:
            raise FrameError(
                f"{owned} was called during backward (a reentrant checkpoint or a reversible block around it): place "
                "the whole block on one rank with smp.set_partition"
            )
        raise FrameError(f"{owned} was called outside a step: call the model inside a function decorated with smp.step")
    refuse_transforms(f"{owned} was called")
    if saved_tensor_hooks_are_set():
        raise FrameError(
            f"{owned} was called inside saved_tensors_hooks, which cannot cross ranks: use them inside one module"
        )
    if parametrize._cache_enabled:
        raise FrameError(
            f"{owned} was called inside parametrize.cached(), whose cache is on one rank: the weights that it computes "
            "there would be computed anew at every use. Enter it inside one module, or place what it calls on one rank "
            "with smp.set_partition"
        )


def refuse_transforms(what: str) -> None:
    """Raise :class:`FrameError` under ``torch.func`` transforms and forward-mode differentiation."""
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0:
        raise FrameError(
            f"{what} under a torch.func transform or forward-mode differentiation, which cannot cross ranks: apply it "
            "inside one module"
        )


def _receive(runtime: Runtime, frame: Frame, call: Call, spec: Any, parts: Any, given: list[torch.Tensor]) -> Any:
    received = unpack(parts)
    needs = [bool(parts.meta(index)[4]) for index in range(len(received))]
    result_spec, returned_spec = spec.split()
    returned = returned_spec.build([], registry) or {}
    if returned.get("open"):
        frame.calls.append(call)
    tensors, call.results = rebuild_results(frame, call.module, received, needs, returned, given)
    result, additions = build(runtime, call.rank, result_spec, tensors)
    if additions is not None:
        collector.incoming(additions)
    return result


class ServerBackward:
    """Backward of remote calls through the execution server; the calls of one level run in parallel."""

    def __init__(self, task: RunningTask, frame: Frame) -> None:
        """For the frame that the task is running backward."""
        self._task = task
        self._frame = frame

    def backward(self, calls: list[tuple[Call, list[tuple[int, torch.Tensor]]]]) -> list[dict[int, torch.Tensor]]:
        """Send every call its results' gradients (or close it) and wait for all answers."""
        server = self._task.runtime.server
        requests = []
        for call, gradients in calls:
            spec, parts = encode(gradients)
            requests.append(
                server.send_request(
                    self._task.worker,
                    to=call.rank,
                    kind="backward" if gradients else "close",
                    model=call.model_id,
                    module=call.module_id,
                    range=None,
                    forward=call.request,
                    control=None,
                    microbatch=self._frame.microbatch,
                    parent=self._frame.request,
                    call=call.number,
                    grad_mode=False,
                    inference_mode=False,
                    autocast=[],
                    checkpointing=False,
                    spec=spec,
                    parts=parts,
                )
            )
            del parts  # the server has it until it is sent
            gradients.clear()
        with suspended():
            answers = server.wait(self._task.worker, requests, "backward")
        return [dict(decode(spec, parts) or ()) for spec, parts in answers]
