"""The requester's side of a remote call's backward: gradients out, the arguments' gradients back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from shardwright.execution.context import suspended
from shardwright.execution.task import RunningTask
from shardwright.frames import Call, Frame, Passed
from shardwright.values import decode, encode


class ThenBackward(NamedTuple):
    """A backward request that the rank before is to send, with its arguments' gradients as those of the results.

    Attributes:
        rank: Whom to ask.
        request: The request's id at the first caller, who gets the answer.
        module: The id of the module.
        forward: The id of the forward request.
        number: The call's number in the first caller's frame.
        indices: For arguments of the request before, by index, the results of this one; None: they have the same.
    """

    rank: int
    request: int
    module: int
    forward: int
    number: int
    indices: list[tuple[int, int]] | None


class ServerBackward:
    """Backward of remote calls through the execution server; the calls of one level run in parallel."""

    def __init__(self, task: RunningTask, frame: Frame) -> None:
        """For the frame that the task is running backward."""
        self._task = task
        self._frame = frame

    def backward(self, calls: list[tuple[Call, list[tuple[int, torch.Tensor]]]]) -> list[dict[int, torch.Tensor]]:
        """Send every call its results' gradients (or close it) and wait for all answers."""
        requests: list[int] = []
        places = []  # where among the requests the arguments' gradients come back
        for call, gradients in calls:
            kind = "backward" if gradients else "close"
            then = self._announce(call, kind)
            spec, parts = encode((gradients, [tuple(one) for one in then]))
            requests.append(self._send(call, kind, spec, parts))
            requests += [one.request for one in then]
            places.append(len(requests) - 1)
            del parts  # the server has it until it is sent
            gradients.clear()
        with suspended():
            answers = self._task.runtime.server.wait(self._task.worker, requests, "backward")
        return [dict(decode(*answers[place]) or ()) for place in places]

    def _announce(self, call: Call, kind: str) -> list[ThenBackward]:
        """The requests that follow, each sent by the rank of the one before."""
        then: list[ThenBackward] = []
        while True:
            then += [self._then(call, kind, one, None) for one in reversed(call.passed)]
            if call.onward is None:
                return then
            call, indices = call.onward
            then.append(self._then(call, kind, call, list(indices.items())))

    def _then(self, call: Call, kind: str, one: Call | Passed, indices: list[tuple[int, int]] | None) -> ThenBackward:
        request = self._task.runtime.server.announce_request(
            self._task.worker,
            to=one.rank,
            kind=kind,
            model=call.model_id,
            module=one.module_id,
            microbatch=self._frame.microbatch,
            forward=one.request,
        )
        return ThenBackward(one.rank, request, one.module_id, one.request, one.number, indices)

    def _send(self, call: Call, kind: str, spec: Any, parts: Any) -> int:
        request: int = self._task.runtime.server.send_request(
            self._task.worker,
            to=call.rank,
            kind=kind,
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
        return request
