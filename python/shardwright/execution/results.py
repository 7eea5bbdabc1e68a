"""Results of remote calls: tensors that stay on the rank that computed them, and predicted answers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import Node

from shardwright import _core
from shardwright.devices import current_stream, device_here
from shardwright.errors import FrameError
from shardwright.execution.context import Suspended
from shardwright.execution.task import RunningTask, running_task
from shardwright.frames import Call, Frame
from shardwright.frames.remote import RemoteTensor, bring, is_remote, remote_tensor
from shardwright.values.tensors import Meta, Origin, dtype_of, unpack_one


def sites_of(cfg: Any) -> _core.Sites:
    """Create the record of calls for predictions, empty, for a job with this configuration.

    The ranks of a tensor-parallel group have data of their own, such as masks that only some of them need, and may use
    a result on one rank only. There results come with the answer, for which all of them wait.
    """
    return _core.Sites(
        tensor_handles=cfg.tensor_handles and cfg.tensor_parallel_degree == 1,
        fast_mode=cfg.fast_mode,
        static_mode=cfg.static_mode,
        static_steps=cfg.static_steps,
    )


class Response:
    """The answer to a call, whose tensors may still be on the rank that computed them.

    A task keeps the responses that have not fully arrived until it ends, so that tensors that outlive it are fetched
    before.
    """

    def __init__(
        self, task: RunningTask, frame: Frame, site: int, requests: list[int], *, held: bool, is_there: bool
    ) -> None:
        """Create the response to a call that consists of one request, or of a chain of requests.

        Args:
            task: The task that made the call.
            frame: The frame in which the call was made.
            site: The call's number in the record for predictions.
            requests: The ids of the requests.
            held: Whether the answering ranks keep the tensors of results until they are fetched or released.
            is_there: Whether the answers have arrived; otherwise they are predicted.
        """
        self.runtime = task.runtime
        self.frame = frame
        self.site = site
        self.requests = requests
        self.held = held
        self._predicted = not is_there
        #: The rank and the module of the last request that ran, and its index among the requests.
        self.holder, self.module, self.last = 0, "", 0
        #: The tensors of that request's answer that have arrived; None until the answer has arrived.
        self._parts: _core.TensorParts | None = None
        #: Tensors that were fetched at the task's end, by index.
        self.fetched: dict[int, _core.TensorParts] = {}
        #: Tensors that are on another rank until this rank uses them.
        self.tensors: list[Any] = []
        if not is_there:
            task.responses.append(self)

    def answered(self, call: Call, last: int, answer: _core.Answer | _core.Description) -> None:
        """Set the call that gave the result, its index among the requests, and its answer."""
        self.holder, self.module, self.last = call.rank, call.module, last
        if isinstance(answer, _core.Answer):
            self._parts = answer.parts

    def in_order(self) -> None:
        """Record that the call changes the state of a module: from now on its callers continue only after it."""
        self.runtime[_core.Sites].set_ordered(self.site)
        self._task().ordered = True

    def tensors_of(self, answer: _core.Answer | _core.Description, count: int, *, may_stay: bool) -> list[torch.Tensor]:
        """Return the tensors of the answer; with ``may_stay``, those on other ranks are fetched when they are used."""
        return [
            self.take(index)
            if not may_stay or (self._parts is not None and self._parts.is_here(index))
            else self._remote(index, answer.meta(index))
            for index in range(count)
        ]

    def _remote(self, index: int, meta: Meta) -> torch.Tensor:
        dtype, shape, strides, device, _ = meta
        on = device_here(device)
        tensor: torch.Tensor = remote_tensor(
            shape, strides, dtype_of(dtype), on, _Tensor(self, index, meta, on, current_stream(on))
        )
        task = self._task()
        task.left_results = True
        if not self._predicted and not self.tensors:
            task.responses.append(self)
        self.tensors.append(tensor)
        return tensor

    def take(self, index: int, device: torch.device | None = None) -> torch.Tensor:
        """Return a tensor with its values; wait for the answer, and fetch the tensor if the answer lacks it.

        Args:
            index: Its place in the answer.
            device: The device to put it on; by default the current one of its type.
        """
        parts = self.verify()
        if parts.is_here(index):
            return unpack_one(parts, index, device)
        if index not in self.fetched:
            self.runtime[_core.Sites].wants(self.site)
            task = self._task()
            with Suspended():
                (answer,) = self.runtime.server.wait(task.worker, [self.fetch(index)], task.phase)
            self.fetched[index] = answer.parts
        return unpack_one(self.fetched.pop(index), 0, device)

    def fetch(self, index: int) -> int:
        """Ask for a tensor that the answer lacks; return the request's id."""
        return self.runtime.server.fetch(self._task().worker, self.holder, self.requests[self.last], index)

    def missing(self) -> list[int]:
        """Return the indices of the tensors that the answer, which has arrived, lacks."""
        parts = self.verify()
        return [index for tensor in self.tensors if not parts.is_here(index := tensor.source.index)]

    def look(self) -> bool:
        """Return whether the answer has arrived, without waiting."""
        if self._parts is None:
            answers = self.runtime.server.take_if_answered(self.requests)
            if answers is not None:
                self._parts = answers[self.last].parts
        return self._parts is not None

    def verify(self) -> _core.TensorParts:
        """Wait for the answer. An answer that differs from the predicted one fails the step.

        Returns:
            The tensors of the answer.
        """
        if self._parts is None:
            task = self._task()
            # The schedule decides which task continues, except for a task that is ending.
            if not task.ending or not self.look():
                with Suspended():
                    answers = self.runtime.server.wait(task.worker, self.requests, task.phase)
                self._parts = answers[self.last].parts
        assert self._parts is not None, "it has been waited for"
        return self._parts

    def _task(self) -> RunningTask:
        task = running_task()
        if task is None or task.runtime is not self.runtime:
            raise FrameError(
                f"a result of module {self.module!r}, which rank {self.holder} owns, was used for the first time "
                "outside the tasks of its step, on a thread of its own: use it in the step function or in a module, "
                "for example by clone(), before another thread does"
            )
        return task


@dataclass(slots=True)
class _Tensor:
    """One tensor of a response."""

    response: Response
    index: int
    meta: Meta
    #: Where its values will be on this rank; as the placeholder says, whatever device is the current one then.
    device: torch.device
    #: The stream on which the call would have computed it here; None for a device without streams.
    stream: Any = None

    def take(self) -> torch.Tensor:
        """Take the values, in the order of the stream of the call.

        The first use may be on another stream, which the script has had wait for that of the call before; a use on a
        third one need not wait for this. So the values are there before anything else is given to any stream.
        """
        if self.stream == current_stream(self.device):
            return self.response.take(self.index, self.device)
        with torch.cuda.stream(self.stream):
            values = self.response.take(self.index, self.device)
        self.stream.synchronize()
        return values

    def arrived(self, before: Node | None, after: Node | None) -> None:
        frame = self.response.frame
        if before is not None and after is not None:
            if before in frame.unhookable:
                frame.unhookable[after] = frame.unhookable[before]
            if before in frame.hooked_elsewhere:
                frame.hooked_elsewhere.add(after)


def origins_of(tensors: list[torch.Tensor]) -> dict[int, Origin]:
    """Return, by index, the origins of tensors that the ranks holding them can send directly to the receiver."""
    origins = {}
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, RemoteTensor) and is_remote(tensor):
            source = tensor.source
            assert isinstance(source, _Tensor), "made by a response"
            response = source.response
            if response.held:
                request = response.requests[response.last]
                origins[index] = source.meta, response.holder, response.runtime.place.rank, request, source.index
    return origins


def release_unused(task: RunningTask) -> None:
    """Let other ranks free the results that nothing on this rank refers to any more."""
    if not task.responses:
        return
    kept = []
    released: dict[int, list[int]] = {}
    for place, response in enumerate(task.responses):
        if not response.look():  # answers arrive roughly in the order of the calls
            kept += task.responses[place:]
            break
        response.tensors = [tensor for tensor in response.tensors if is_remote(tensor)]
        if all(sys.getrefcount(tensor) <= _UNUSED for tensor in response.tensors):
            response.tensors = []
            released.setdefault(response.holder, []).extend(response.requests)
        else:
            kept.append(response)
    task.responses = kept
    for holder, requests in released.items():
        task.runtime.server.release(holder, requests)


def finish(task: RunningTask) -> None:
    """End a task: wait for its answers, and fetch the tensors that are still referenced."""
    for response in task.responses:
        response.verify()
    release_unused(task)
    _fetch_rest(task)
    for response in task.responses:
        bring(response.tensors)
    release_unused(task)


def _fetch_rest(task: RunningTask) -> None:
    """Fetch all that the responses of an ending task lack, in one wait.

    What is still referenced is also a matter of when Python collects garbage, and the ranks of a tensor-parallel group
    must give up the turn equally often. They therefore wait even if there is nothing to fetch, and fetches do not
    change how later calls are made.
    """
    runtime, alone = task.runtime, len(task.runtime.place.tp_ranks) == 1
    missing = [(response, index) for response in task.responses for index in response.missing()]
    if not missing and (alone or not task.left_results):
        return
    requests = [response.fetch(index) for response, index in missing]
    with Suspended():
        answers = runtime.server.wait(task.worker, requests, task.phase)
    for (response, index), answer in zip(missing, answers, strict=True):
        response.fetched[index] = answer.parts
        if alone:
            runtime[_core.Sites].wants(response.site)


def _references() -> int:
    """Return the reference count that :func:`release_unused` sees for a tensor that only a list refers to."""
    tensors = [torch.empty(0)]
    (count,) = (sys.getrefcount(tensor) for tensor in tensors)
    return count


_UNUSED = _references()
