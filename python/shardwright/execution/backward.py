"""The requester's side of the backward of a remote call: send the results' gradients, receive the arguments'."""

from __future__ import annotations

import torch

from shardwright import _core
from shardwright.execution.context import Suspended
from shardwright.execution.gradients import pack_gradients, unpack_gradients
from shardwright.execution.task import RunningTask
from shardwright.frames import Call, Frame, Passed


class ServerBackward:
    """Run the backward of remote calls through the execution server; the calls of one level run in parallel."""

    def __init__(self, task: RunningTask, frame: Frame) -> None:
        """Create the backward of the remote calls of `frame`, whose backward `task` runs."""
        self._task = task
        self._frame = frame

    def backward(self, calls: list[tuple[Call, list[tuple[int, torch.Tensor]]]]) -> list[dict[int, torch.Tensor]]:
        """Send each call the gradients of its results, or close it, and wait for all answers."""
        server = self._task.runtime.server
        requests: list[int] = []
        places = []  # the indices of the requests whose answers hold the arguments' gradients
        for call, gradients in calls:
            chain, announced = self._announce(call, closes=not gradients)
            pairs, parts = pack_gradients(gradients)
            asked = _core.BackwardCall(call.module_id, call.request, gradients=pairs, chain=chain)
            place = _core.Place(
                model=call.model_id,
                microbatch=self._frame.microbatch,
                parent=self._frame.request,
                number=call.number,
            )
            requests.append(server.send_backward(self._task.worker, call.rank, place, asked, parts))
            requests += announced
            places.append(len(requests) - 1)
            del parts  # the server holds it until it is sent
            gradients.clear()
        with Suspended():
            answers = server.wait(self._task.worker, requests, "backward")
        return [dict(unpack_gradients(answers[place].gradients, answers[place].parts)) for place in places]

    def _announce(self, call: Call, *, closes: bool) -> tuple[list[_core.BackwardLink], list[int]]:
        """Return the requests that follow in the chain, each sent by the rank of the previous one, and their ids."""
        links: list[_core.BackwardLink] = []
        while True:
            links += [self._link(call, one, None, closes=closes) for one in reversed(call.passed)]
            if call.onward is None:
                return links, [link.request for link in links]
            call, indices = call.onward
            links.append(self._link(call, call, list(indices.items()), closes=closes))

    def _link(
        self, call: Call, one: Call | Passed, results: list[tuple[int, int]] | None, *, closes: bool
    ) -> _core.BackwardLink:
        request = self._task.runtime.server.announce_backward(
            self._task.worker,
            to=one.rank,
            model=call.model_id,
            module=one.module_id,
            microbatch=self._frame.microbatch,
            forward=one.request,
            closes=closes,
        )
        return _core.BackwardLink(
            rank=one.rank,
            request=request,
            module=one.module_id,
            forward=one.request,
            number=one.number,
            results=results,
        )
