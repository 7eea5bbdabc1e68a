"""Ranks simulated in one process: a request runs at once, in a thread of its own, on its owner's copy of the model.

The copies share parameters and buffers, so that gradients are found where plain torch puts them; everything else, and
the threads' state, is apart as it is between processes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from shardwright import _core
from shardwright import guards as all_guards
from shardwright.execution.backward import ServerBackward
from shardwright.execution.call import RemoteModule
from shardwright.execution.context import StepState
from shardwright.execution.encoder import pad_with_zeros
from shardwright.execution.frame_table import FrameTable
from shardwright.execution.intercept import group_sequential, make_remote
from shardwright.execution.placed import placed_model
from shardwright.execution.results import finish, release_unused
from shardwright.execution.serve import root_frame, run_forward, run_request_backward
from shardwright.execution.task import RunningTask, set_running_task
from shardwright.execution.turn import Turn
from shardwright.frames import close_calls, guards, in_frame
from shardwright.frames.remote import bring
from shardwright.job.runtime import Runtime
from shardwright.job.wrapped import WrappedModels
from shardwright.model.backward import _roots, run_backward
from shardwright.step.output import map_tensors
from shardwright.values import pack, registry, unpack
from shardwright.values.tensors import unpack_one
from torch import nn

from tests.frames.fake_request import FakeRequest
from tests.jobs.patience import HANG_SECONDS
from tests.jobs.runtimes import make_runtime

_threads = ThreadPoolExecutor(max_workers=256, thread_name_prefix="loopback")
_SECONDS = HANG_SECONDS


@dataclass
class LoopbackServer:
    """Runs requests on the simulated ranks that they are sent to, when their requester begins to wait."""

    job: LoopbackJob
    responses: dict[int, _core.Answer] = field(default_factory=dict)
    requests: list[FakeRequest] = field(default_factory=list)
    sent: list[FakeRequest] = field(default_factory=list)
    numbers: int = 0
    held: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    handed_on: int = 0
    fetches: int = 0

    @property
    def kinds(self) -> list[str]:
        """The kinds of the requests so far."""
        return [request.kind for request in self.requests]

    def send_forward(
        self,
        worker: int,
        to: int,
        place: _core.Place,
        call: _core.ForwardCall,
        spec: _core.Spec,
        parts: _core.TensorParts,
        *,
        hold: bool,
        expected: None,
    ) -> int:
        """Take a request; ``worker`` is here the requesting rank."""
        return self._take(FakeRequest(self._number(), to, worker, place, call, spec, self.with_held(parts), hold))

    def send_backward(
        self, worker: int, to: int, place: _core.Place, call: _core.BackwardCall, parts: _core.TensorParts
    ) -> int:
        """Take a request."""
        return self._take(FakeRequest(self._number(), to, worker, place, call, None, self.with_held(parts)))

    def _take(self, request: FakeRequest) -> int:
        self.requests.append(request)
        self.sent.append(request)
        return request.id

    def _number(self) -> int:
        self.numbers += 1
        return self.numbers - 1

    def with_held(self, parts: _core.TensorParts) -> _core.TensorParts:
        """Put held tensors where a request lacks them, as the execution server does."""
        origins = [parts.held(index) for index in range(len(parts))]
        if not any(origins):
            return parts
        self.handed_on += 1
        needs = [parts.meta(index)[4] for index in range(len(parts))]
        tensors = [
            unpack_one(parts, index) if origin is None else self.held[origin[1], origin[2]][origin[3]]
            for index, origin in enumerate(origins)
        ]
        return pack(tensors, needs)

    def fetch(self, worker: int, holder: int, request: int, index: int) -> int:
        """Give a held tensor as the answer to a request of its own."""
        self.fetches += 1
        number = -self.fetches
        parts = pack([self.held[worker, request][index]], [False])
        self.responses[number] = _core.Answer.value(_core.flatten(None, registry)[0], parts)
        return number

    def release(self, holder: int, requests: list[int]) -> None:
        """Forget held tensors."""
        for request in requests:
            for requester in range(len(self.job.runtimes)):
                self.held.pop((requester, request), None)

    def announce_forward(self, worker: int, **fields: Any) -> int:
        """Number a request that another rank will send."""
        return self._number()

    def announce_backward(self, worker: int, **fields: Any) -> int:
        """Number a request that another rank will send."""
        return self._number()

    def send_forward_for(
        self,
        worker: int,
        like: FakeRequest,
        link: _core.ForwardLink,
        call: _core.ForwardCall,
        spec: _core.Spec,
        parts: _core.TensorParts,
    ) -> None:
        """Run an announced request at once: nobody waits in this call."""
        self._run_for(like, link, call, spec, parts)

    def send_backward_for(
        self,
        worker: int,
        like: FakeRequest,
        link: _core.BackwardLink,
        call: _core.BackwardCall,
        parts: _core.TensorParts,
    ) -> None:
        """Run an announced request at once: nobody waits in this call."""
        self._run_for(like, link, call, None, parts)

    def _run_for(
        self,
        like: FakeRequest,
        link: _core.ForwardLink | _core.BackwardLink,
        call: _core.ForwardCall | _core.BackwardCall,
        spec: _core.Spec | None,
        parts: _core.TensorParts,
    ) -> None:
        place = _core.Place(model=like.model, microbatch=like.microbatch, parent=like.place.parent, number=link.number)
        request = FakeRequest(link.request, link.rank, like.requester, place, call, spec, parts, like.hold)
        self.requests.append(request)
        self.job.in_new_thread(request.to, request)

    def wait(self, worker: int, requests: list[int], phase: str) -> list[_core.Answer]:
        """Run what was sent, and give the answers."""
        sent, self.sent = self.sent, []
        for request in sent:
            self.job.in_new_thread(request.to, request)
        return [self.responses.pop(request) for request in requests]

    def ends_with_forward(self, worker: int) -> None:
        """No schedule has to know."""

    def respond(self, request: FakeRequest, answer: _core.Answer) -> None:
        """Keep an answer, and apart from it the tensors that are to be held."""
        if request.hold and len(answer.parts):
            metas = [answer.meta(index) for index in range(len(answer.needs()))]
            self.held[request.requester, request.id] = unpack(answer.parts)
            parts = _core.TensorParts()
            for index, meta in enumerate(metas):
                place = {"requester": request.requester, "request": request.id, "index": index}
                parts.append_held(*meta, holder=request.to, **place)
            answer = _core.Answer.result(answer.spec, parts, answer.notes)
        self.responses[request.id] = answer


@dataclass(eq=False)
class LoopbackPlacement:
    """The placement that the executing side asks for modules: one rank's copy of the model."""

    names: list[str]
    modules: list[nn.Module]
    one_at_a_time: bool = False
    kept: None = None

    def wait_until_placed(self, task: RunningTask) -> None:
        """Placed from the start."""

    def module_of(self, module_id: int) -> nn.Module:
        """The rank's own copy."""
        return self.modules[module_id]

    def name_of(self, module_id: int) -> str:
        """The name."""
        return self.names[module_id]

    def is_divided(self, module: nn.Module) -> bool:
        """As the real placement has it."""
        return module in guards.divided_modules


class LoopbackModels(WrappedModels):
    """The only model of a simulated rank."""

    def __init__(self, rank: int, placement: LoopbackPlacement) -> None:
        super().__init__(rank)
        self._placement = placement

    def placement_of(self, model_id: int) -> LoopbackPlacement:
        return self._placement


def loopback_runtime(rank: int, server: LoopbackServer, placement: LoopbackPlacement, turn: Turn) -> Runtime:
    """One simulated rank."""
    runtime = make_runtime(rank, rank + 1, server=server)
    runtime.add(turn)
    runtime.add(LoopbackModels(rank, placement), WrappedModels)
    runtime.step.number = 1
    return runtime


class LoopbackJob:
    """One model whose modules are divided over simulated ranks."""

    def __init__(self, model: nn.Module, owners: Callable[[str], int]) -> None:
        """``owners`` gives the rank of each module by name; the root is on rank 0, which takes ``model`` itself."""
        self.model = model
        names = [name for name, _ in model.named_modules()]
        self.owners = {name: owners(name) for name in names}
        self.server = LoopbackServer(self)
        shared = [*model.parameters(), *model.buffers()]
        self.copies = [model]
        for _ in range(max(self.owners.values())):
            self.copies.append(copy.deepcopy(model, {id(tensor): tensor for tensor in shared}))
        self.runtimes = []
        turn = Turn()  # all ranks are one process
        for rank, copied in enumerate(self.copies):
            placement = LoopbackPlacement(names, list(copied.modules()))
            self._divide(rank, placement)
            self.runtimes.append(loopback_runtime(rank, self.server, placement, turn))
        self._state: StepState | None = None

    def _divide(self, rank: int, placement: LoopbackPlacement) -> None:
        """Intercept calls to what other ranks own, as ``Placement`` does."""
        ids = {name: index for index, name in enumerate(placement.names)}
        targets: dict[int, RemoteModule] = {}
        for name, module in zip(placement.names, placement.modules, strict=True):
            if self.owners[name] != rank and next(module.parameters(), None) is not None:
                targets[id(module)] = RemoteModule(name, ids[name], 0, self.owners[name])
        for module in placement.modules:
            if any(id(part) in targets for part in module.modules()):
                guards.divided_modules.add(module)
        for name, module in zip(placement.names, placement.modules, strict=True):
            if id(module) in targets:
                make_remote(module, targets[id(module)], lambda _: None)
            elif isinstance(module, nn.TransformerEncoder):
                pad_with_zeros(module)
            elif isinstance(module, nn.Sequential):
                group_sequential(
                    module,
                    lambda child: targets.get(id(child)),
                    lambda owner, _, name=name: RemoteModule(name, ids[name], 0, owner),
                )

    def in_new_thread(self, rank: int, request: FakeRequest) -> None:
        """Run a request on a rank, in a thread that has torch's defaults, as a worker has."""
        assert self._state is not None
        variables = self._state.variables.copy()
        _threads.submit(variables.run, self._serve, rank, request).result(_SECONDS)

    def _serve(self, rank: int, request: FakeRequest) -> None:
        assert self._state is not None
        runtime: Any = self.runtimes[rank]
        phase = "forward" if request.kind == "forward" else "backward"
        name = placed_model(runtime, 0).name_of(request.module)
        task = RunningTask(runtime, rank, name, request.microbatch, phase, self._state)
        set_running_task(task)
        runtime[Turn].take(task)
        try:
            with self._state.applied():
                (run_forward if request.kind == "forward" else run_request_backward)(runtime, request, task)
        except BaseException as error:
            guards.close_checkpoints(error)
            raise
        finally:
            set_running_task(None)

    @property
    def live_frames(self) -> int:
        """How many frames wait on all ranks."""
        return sum(len(runtime[FrameTable]) for runtime in self.runtimes)

    def run(self, function: Callable[[Callable[..., None]], Any], microbatch: int = 0) -> Any:
        """Run a step function for one microbatch; it gets the function to call for backward.

        As in a real step, nothing is kept when it fails.
        """
        self._state = StepState.capture()
        try:
            return _threads.submit(self._state.variables.copy().run, self._root, function, microbatch).result(_SECONDS)
        except BaseException:
            for runtime in self.runtimes:
                runtime[FrameTable].clear()
            raise

    def _root(self, function: Callable[[Callable[..., None]], Any], microbatch: int) -> Any:
        assert self._state is not None
        runtime: Any = self.runtimes[0]
        task = RunningTask(runtime, 0, None, microbatch, "forward", self._state)
        frame = root_frame(task)

        def backward(tensors: Any, grad_tensors: Any = None) -> None:
            release_unused(task)
            frame.settle()
            roots = _roots(tensors, grad_tensors)
            with in_frame(None):
                run_backward(frame, roots, ServerBackward(task, frame))
            frame.forget_watched()

        set_running_task(task)
        runtime[Turn].take(task)
        try:
            with self._state.applied(), self._state.task.applied():
                with in_frame(frame):
                    result = function(backward)
                frame.settle()
                result = map_tensors(result, bring)
                finish(task)
                close_calls(frame, ServerBackward(task, frame))
        except BaseException as error:
            guards.close_checkpoints(error)
            raise
        finally:
            set_running_task(None)
        return result

    def end_step(self) -> None:
        """Forget what lasts for a step."""
        for runtime in self.runtimes:
            runtime[FrameTable].clear()

    def owned_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers, as each owner has them."""
        found = {}
        for name, owner in self.owners.items():
            module = self.copies[owner].get_submodule(name)
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    found[f"{name}.{key}" if name else key] = buffer
        return found


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """The guards that a runtime with several ranks puts in place."""
    with all_guards.installed(num_ranks=2, pipelined=True, divided=True):
        yield


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """The gradients by parameter name."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}
