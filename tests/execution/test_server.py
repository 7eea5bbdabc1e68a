"""The execution server as Python pulls on it: whole steps over two ranks, their failures, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from shardwright import _core
from shardwright.errors import (
    PeerLostError,
    RemoteError,
    ShardwrightError,
    StallError,
    StepAborted,
    StepMismatchError,
)
from shardwright.values import pack, registry, unpack

from tests.jobs.patience import HANG_SECONDS

Run = Callable[["Rank", int, Any], Any]


class Rank:
    """A rank with scripted tasks: ``run`` answers every task, on real worker threads."""

    def __init__(self, node: Any, rank: int, world: int, **changed: Any) -> None:
        settings = {"stall_report_seconds": 5.0, "stall_timeout_seconds": 20.0, "trace_capacity": 1000, **changed}
        self.server = _core.Server.attach(
            node, rank=rank, host=f"host-{rank}", pp_ranks=list(range(world)), tp_ranks=[rank], **settings
        )
        self.rank = rank
        self.node = node
        self.threads: list[threading.Thread] = []
        self.error: BaseException | None = None

    def step(self, number: int, run: Run, function: str = "train_step", microbatches: int = 2) -> Any:
        self.server.begin_step(
            step=number,
            function=function,
            num_microbatches=microbatches,
            pipeline="interleaved",
            active_microbatches=2,
        )
        while True:
            event = self.server.supervise()
            if event.kind == _core.EventKind.START_WORKER:
                thread = threading.Thread(target=self._work, args=(event.worker, run), daemon=True)
                self.threads.append(thread)
                thread.start()
            elif event.kind == _core.EventKind.CONTROL:
                self.server.respond(event.request, _core.Answer.value(*body(event.request.control)))
            elif event.kind == _core.EventKind.ROOT_DONE:
                self.server.end_step(*body(number))
                result = number
                break
            elif event.kind == _core.EventKind.STEP_END:
                result = value_of(*event.body)
                break
            elif event.kind == _core.EventKind.ABORTED_LOCALLY:
                assert self.error is not None
                raise self.error
        self.server.leave_step()
        return result

    def _work(self, worker: int, run: Run) -> None:
        while (task := self.server.next_task(worker)) is not None:
            try:
                answer = run(self, worker, task)
                if task.request is not None:
                    self.server.respond(task.request, _core.Answer.value(*body(answer)))
            except StepAborted:
                pass
            except Exception as error:
                self.error = error
                self.server.fail(
                    module="model.layer",
                    microbatch=task.microbatch,
                    phase="forward",
                    kind=type(error).__name__,
                    message=str(error),
                    traceback="Traceback of the test",
                )

    def request(self, worker: int | None, value: Any, *, to: int, call: Any = None, **place: int) -> int:
        at = _core.Place(**{"model": 0, "microbatch": 0, **place})  # type: ignore[arg-type]
        return self.server.send_forward(worker, to, at, call or forward_call(), *body(value))

    def call(self, worker: int, value: Any, *, to: int, call: Any = None, **place: int) -> Any:
        request = self.request(worker, value, to=to, call=call, **place)
        [answer] = self.server.wait(worker, [request], "forward")
        return value_of(answer.spec, answer.parts)

    def close(self) -> None:
        self.server.close()
        for thread in self.threads:
            thread.join(HANG_SECONDS)
            assert not thread.is_alive()


def forward_call(children: tuple[int, int] | None = None, **context: Any) -> _core.ForwardCall:
    state = _core.TorchContext(**{"grad_mode": True, **context})
    return _core.ForwardCall(3, children, seed=0, notes=_core.ArgumentNotes(), context=state)


def body(value: Any) -> tuple[_core.Spec, _core.TensorParts]:
    spec, tensors = _core.flatten(value, registry)
    return spec, pack(tensors, [False] * len(tensors))


def value_of(spec: Any, parts: Any) -> Any:
    return spec.build(unpack(parts), registry)


def job(world: int, **changed: Any) -> list[Rank]:
    nodes = _core.Node.in_process(world)
    return [Rank(node, rank, world, **changed) for rank, node in enumerate(nodes)]


def close(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.close()
    for rank in ranks:
        rank.node.close()


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    made = job(2)
    yield made
    close(made)


def on_all(ranks: list[Rank], main: Callable[[Rank], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(main, rank) for rank in ranks]
        return [future.result(HANG_SECONDS) for future in futures]


def double_remotely(rank: Rank, worker: int, task: Any) -> Any:
    if task.kind == _core.TaskKind.ROOT:
        answer = rank.call(worker, torch.full((3,), task.microbatch), to=1, microbatch=task.microbatch)
        assert answer.tolist() == [2 * task.microbatch] * 3
        rank.server.await_backward(worker)
        return None
    return 2 * value_of(task.request.spec, task.request.parts)


def failure_of(main: Callable[[], Any]) -> BaseException:
    with pytest.raises(ShardwrightError) as raised:
        main()
    return raised.value


def test_a_step_runs_over_two_ranks(ranks: list[Rank]) -> None:
    assert on_all(ranks, lambda rank: [rank.step(n, double_remotely) for n in (1, 2)]) == [[1, 2], [1, 2]]
    root, peer = (rank.server.stats() for rank in ranks)
    assert root["step"]["sent"] == peer["step"]["served"] == {"forward": 2, "backward": 0, "close": 0, "control": 0}
    assert root["total"]["sent"]["forward"] == 4
    assert root["live_requests"] == peer["live_requests"] == 0
    assert root["workers_started"] <= 2
    assert peer["workers_started"] == 1


def test_a_request_shows_every_field_of_the_papers_message(ranks: list[Rank]) -> None:
    shown: list[str] = []
    fields: dict[str, Any] = {}

    def run(rank: Rank, worker: int, task: Any) -> Any:
        if task.kind == _core.TaskKind.ROOT:
            return rank.call(
                worker,
                {"x": torch.zeros(2, 3)},
                to=1,
                call=forward_call(
                    (1, 4), grad_mode=False, autocast=[("cpu", "bfloat16", True)], checkpointing=(True, False, 2)
                ),
                microbatch=task.microbatch,
                number=5,
            )
        request = task.request
        shown.append(request.text())
        names = ("id", "requester", "step", "model", "module", "control", "microbatch")
        fields.update({name: getattr(request, name) for name in names})
        call, context = request.forward, request.forward.context
        fields.update({"range": call.range, "grad_mode": context.grad_mode, "autocast": context.autocast})
        fields.update({"inference_mode": context.inference_mode, "checkpointing": context.checkpointing})
        with pytest.raises(ValueError, match="<forward request 1 of rank 0> is not a backward"):
            _ = request.backward
        return None

    on_all(ranks, lambda rank: rank.step(1, run, microbatches=1))
    assert fields == {
        "id": 1,
        "requester": 0,
        "step": 1,
        "model": 0,
        "module": 3,
        "range": (1, 4),
        "control": None,
        "microbatch": 0,
        "grad_mode": False,
        "inference_mode": False,
        "autocast": [("cpu", "bfloat16", True)],
        "checkpointing": (True, False, 2),
    }
    text = shown[0]
    for part in (
        "request 1",
        "kind: forward",
        "requester: rank 0",
        "children: 1..4",
        "microbatch: 0",
        "place: call 5 of the step function",
        "grad mode: off",
        "autocast: cpu bfloat16 cache on",
        "checkpointing: 2 children at a time",
        "float32",
    ):
        assert part in text


def test_an_exception_reaches_every_rank_and_the_next_step_runs(ranks: list[Rank]) -> None:
    def run(rank: Rank, worker: int, task: Any) -> Any:
        if task.request is not None and task.request.step == 1 and task.microbatch == 1:
            raise ValueError("bad value")
        return double_remotely(rank, worker, task)

    def main(rank: Rank) -> tuple[BaseException, Any]:
        with pytest.raises((RemoteError, ValueError)) as raised:
            rank.step(1, run)
        return raised.value, rank.step(2, run)

    (remote, first), (own, second) = on_all(ranks, main)
    assert type(own) is ValueError
    assert isinstance(remote, RemoteError)
    assert (remote.rank, remote.module, remote.microbatch, remote.phase) == (1, "model.layer", 1, "forward")
    assert (remote.kind, remote.message, remote.traceback) == ("ValueError", "bad value", "Traceback of the test")
    assert (first, second) == (2, 2)


def test_different_step_functions_are_named_on_every_rank(ranks: list[Rank]) -> None:
    def main(rank: Rank) -> BaseException:
        return failure_of(lambda: rank.step(1, double_remotely, function=f"function_{rank.rank}"))

    for error in on_all(ranks, main):
        assert type(error) is StepMismatchError
        assert "function_0" in str(error)
        assert "function_1" in str(error)


def test_a_rank_that_left_is_missed_by_the_step_that_needs_it(ranks: list[Rank]) -> None:
    def main(rank: Rank) -> BaseException | None:
        if rank.rank == 1:
            rank.node.close({"kind": "KeyError", "message": "'text'", "traceback": "Traceback of the loader"})
            return None
        return failure_of(lambda: rank.step(1, double_remotely))

    error = on_all(ranks, main)[0]
    assert isinstance(error, PeerLostError)
    assert error.rank == 1
    assert "KeyError: 'text'" in str(error)
    assert "step 1 (train_step) needs it" in str(error)
    assert error.traceback == "Traceback of the loader"


def test_a_step_in_which_nothing_moves_is_reported_and_ends() -> None:
    made = job(2, stall_report_seconds=0.2, stall_timeout_seconds=1.0)
    try:
        server = made[1].server
        server.begin_step(step=1, function="train_step", num_microbatches=1, pipeline="simple", active_microbatches=1)
        event = server.supervise()
        assert event.kind == _core.EventKind.STALL_REPORT
        assert "waited" in event.text
        assert "rank 0, the root, to enter the step" in event.text
        # Rank 0 is in no step: its main thread runs other code, which counts as progress.
        made[0].server.begin_step(
            step=1, function="train_step", num_microbatches=1, pipeline="simple", active_microbatches=1
        )
        worker = made[0].server.supervise().worker

        def wait_in_vain() -> None:
            task = made[0].server.next_task(worker)
            assert task.kind == _core.TaskKind.ROOT
            with pytest.raises(StepAborted):
                made[0].call(worker, 0, to=1)
            assert made[0].server.next_task(worker) is None

        thread = threading.Thread(target=wait_in_vain)
        made[0].threads.append(thread)
        thread.start()
        # Rank 1's main thread asks for no worker's thread to be started, so the request is never served.
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(failure_of, lambda rank=rank: supervise_to_the_end(rank)) for rank in made]
            errors = [future.result(HANG_SECONDS) for future in futures]
        assert [type(error) for error in errors] == [StallError, StallError]
    finally:
        close(made)


def supervise_to_the_end(rank: Rank) -> None:
    while True:
        rank.server.supervise()


def test_ctrl_c_gets_through_a_wait_of_the_main_thread() -> None:
    [rank] = job(1)
    try:
        # Two microbatches need a worker; the main thread does not start it and waits for ever.
        rank.server.begin_step(
            step=1, function="train_step", num_microbatches=2, pipeline="simple", active_microbatches=1
        )
        assert rank.server.supervise().kind == _core.EventKind.START_WORKER
        timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            rank.server.supervise()
        timer.join()
        rank.server.fail(module=None, microbatch=None, phase=None, kind="KeyboardInterrupt", message="", traceback="")
        assert rank.server.supervise().kind == _core.EventKind.ABORTED_LOCALLY
    finally:
        close([rank])


def test_misuse_is_named(ranks: list[Rank]) -> None:
    server = ranks[0].server
    with pytest.raises(ShardwrightError, match="leave_step was called outside a step"):
        server.leave_step()
    with pytest.raises(ShardwrightError, match="there is no worker 7"):
        server.next_task(7)
    with pytest.raises(ValueError, match="zigzag"):
        server.begin_step(step=1, function="f", num_microbatches=1, pipeline="zigzag", active_microbatches=1)
    server.begin_step(step=1, function="f", num_microbatches=1, pipeline="simple", active_microbatches=1)
    with pytest.raises(ShardwrightError, match=r"begin_step was called while step 1 \(f\) is under way"):
        server.begin_step(step=2, function="f", num_microbatches=1, pipeline="simple", active_microbatches=1)
    with pytest.raises(ShardwrightError, match="rank 9 is not in this pipeline"):
        ranks[0].request(None, 0, to=9)


def test_records_are_what_timelines_are_drawn_from(ranks: list[Rank]) -> None:
    ranks[1].server.name_modules(0, ["", "a", "b", "model.tail"])
    ranks[1].server.keep_trace(True)
    on_all(ranks, lambda rank: rank.step(1, double_remotely))
    records = ranks[1].server.take_trace().records()
    assert ranks[1].server.take_trace().records() == []
    assert ranks[0].server.take_trace().records() == [], "records are kept only where they are asked for"
    forwards = [record for record in records if record["kind"] == "forward"]
    assert [record["microbatch"] for record in forwards] == [0, 1]
    for record in forwards:
        assert record["module"] == "model.tail"
        assert record["rank"] == 1
        assert record["peer"] == 0
        assert record["start_ns"] <= record["end_ns"]
    received = [record for record in records if record["kind"] == "receive"]
    assert [record["bytes"] for record in received] == [24, 24]
