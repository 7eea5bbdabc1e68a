"""Runs one step: split, execute, agree, commit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardwright import _core, interrupts, logs
from shardwright.data_parallel.collectives import ReplicaCollectives
from shardwright.data_parallel.divisor import agreed_divisor
from shardwright.data_parallel.participants import check_left_out, participants
from shardwright.data_parallel.weights import StepWeights
from shardwright.errors import DepartureError, RemoteError, ShardwrightError, StateOrderError, StepAborted
from shardwright.execution import process
from shardwright.execution.backward import ServerBackward
from shardwright.execution.context import StepState
from shardwright.execution.frame_table import FrameTable
from shardwright.execution.reproducible import microbatch_seed
from shardwright.execution.results import finish
from shardwright.execution.serve import root_frame
from shardwright.execution.state_order import StateOrder, all_kept, check_attributes, one_at_a_time
from shardwright.execution.task import RunningTask, running_task
from shardwright.execution.turn import Turn
from shardwright.execution.worker import WorkerPool
from shardwright.frames import Leaves, close_calls, in_frame
from shardwright.frames.remote import bring
from shardwright.job.received import decode_from
from shardwright.job.runtime import Runtime
from shardwright.memory import Announcement, MemoryAccount
from shardwright.model.models import Models
from shardwright.model.updates import Updates
from shardwright.model.vote import vote
from shardwright.model.wrapping import refuse_compiled
from shardwright.offloading import OffloadedActivations
from shardwright.scheduling import Scheduling
from shardwright.speed import SpeedAnnouncement
from shardwright.step.assigned import warn_of_assigned
from shardwright.step.batches import (
    Fingerprints,
    differing_labels,
    fingerprints,
    is_compared,
    warn_of_labels,
    warn_of_others,
)
from shardwright.step.deferred import deferring_large
from shardwright.step.failing import fail_step
from shardwright.step.output import map_tensors, merge_microbatches
from shardwright.step.split import MicrobatchArguments
from shardwright.step.transaction import StepTransaction, Trained
from shardwright.tensor_parallel.group import TensorGroup
from shardwright.timeline.trace import begin_step
from shardwright.transformers_models.switching import in_microbatch
from shardwright.values import encode

#: A step departs once and becomes stricter three times. Ranks that detected different causes may need one more run.
_MAX_RUNS = 6

if TYPE_CHECKING:
    from shardwright.model.placement import Placement
    from shardwright.step.decorator import StepFunction


def run_step(runtime: Runtime, step: StepFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one step on this rank: as the root, as a peer of the root, or alone.

    A step is repeated on all ranks in two cases: if a module departed from what static mode expected, it runs again as
    in dynamic mode; and if microbatches used a module's state in another order than in one process, it runs again in a
    stricter order.
    """
    runtime.check_process(step.name)
    refuse_compiled((*args, *kwargs.values()))
    runtime.step.num_microbatches = step.num_microbatches(runtime)
    runtime[Scheduling].check(step.name, runtime.step.num_microbatches)
    runtime[Announcement].begin_step()
    runtime[SpeedAnnouncement].begin_step()
    # If the writers of modules' state are unknown, so are the calls to wait for.
    predicts = not runtime[StateOrder].one_at_a_time
    with interrupts.InterruptibleStep():
        for _ in range(_MAX_RUNS - 1):
            try:
                return _run_once(runtime, step, args, kwargs, predicts=predicts)
            except DepartureError as error:
                if runtime.place.cfg.on_departure == "error":
                    raise
                runtime[StateOrder].departures += 1
                _say_again(runtime, step, error)
                if len(runtime.place.tp_ranks) > 1 and not runtime[_core.Sites].restart():
                    runtime.logger.warning(
                        "static mode predicts nothing from now on: too many steps departed from it; the calls of all "
                        "tensor-parallel ranks must be alike for it"
                    )
            except StateOrderError as error:
                runtime[StateOrder].tighten(runtime, error)
                _say_again(runtime, step, error)
            predicts = False
        return _run_once(runtime, step, args, kwargs, predicts=False)


def _say_again(runtime: Runtime, step: StepFunction[..., Any], error: RemoteError) -> None:
    order = "; from now on microbatches run one after another" if runtime[StateOrder].one_at_a_time else ""
    where = f"rank {error.rank}: {error.message}"
    runtime.logger.warning("step %d (%s) is run again%s: %s", runtime.step.number, step.name, order, where)


def _run_once(
    runtime: Runtime,
    step: StepFunction[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    predicts: bool,
) -> Any:
    if runtime.step.running or running_task() is not None:
        raise ShardwrightError(f"{step.name} was called inside another step function; steps do not nest")
    models = runtime[Models].alive  # keeps the models alive during the step
    placements = [model.placement for model in models]
    # A single rank has only one order.
    ordered = runtime.place.cfg.deterministic_server and runtime.place.pp_size > 1
    may_depart = predicts and runtime[_core.Sites].learns
    transaction = StepTransaction(placements, runtime[Turn] if ordered else None, attributes=may_depart)
    runtime.step.running, runtime.step.entered = True, False
    begin_step(runtime)
    try:
        for placement in placements:
            placement.reset_shards()
        transaction.begin()
        runtime[Turn].attributes.begin_step()
        for kept in all_kept(placements):
            kept.begin_step()
        runtime.add(StepWeights(runtime.place.rank, runtime.step.num_microbatches))
        runtime[_core.Sites].begin_step(runtime.step.number, step.name, predicts=predicts)
        runtime[Leaves].begin_step(
            Trained(transaction, placements),
            runtime.step.number,
            checks=runtime.place.launch.world_size * runtime.step.num_microbatches > 1,
        )
        runtime[Updates].check()
        runtime[MemoryAccount].begin_step()
        with interrupts.DeliverSignals():
            taking_part = _begin_reductions(runtime, transaction, placements)
            transaction.begin_tasks()
            results = _run_tasks(runtime, step, transaction, args, kwargs)
            runtime[MemoryAccount].end_tasks()
            if (group := runtime.find(TensorGroup)) is not None:
                group.end_step()
            _prepare(runtime, step, transaction, placements, taking_part)
        _commit(runtime, transaction, taking_part)
    except BaseException as error:
        with interrupts.DeferSignals():
            fail_step(runtime, error, transaction)
        if isinstance(error, StepAborted):  # a wait of this thread was aborted with the tasks; the reason is now known
            runtime.check_abort([])
        raise
    finally:
        runtime.step.running = False
        runtime[MemoryAccount].leave_step()
        runtime[Leaves].end_step()
    for placement in placements:
        if placement.partitioned:
            placement.shard()
    runtime.step.end()
    runtime[StateOrder].end_step(runtime)
    for kept in all_kept(placements):
        kept.end_step()
    runtime[Scheduling].end_step(runtime)
    runtime[Announcement].end_step()
    runtime[SpeedAnnouncement].end_step()
    if any(placement.post_step_hooks for placement in placements):
        with interrupts.DeliverSignals():
            for placement in placements:
                placement.after_step()
    return merge_microbatches(results, runtime[StepWeights].of_outputs())


def _begin_reductions(
    runtime: Runtime, transaction: StepTransaction, placements: Sequence[Placement]
) -> list[Placement]:
    """Prepare the collectives of the step, and return the models that take part in them."""
    if runtime[ReplicaCollectives].dp is None:
        return list(placements)
    for collectives in runtime[ReplicaCollectives].all:
        collectives.begin_step()
    if (group := runtime.find(TensorGroup)) is not None:
        group.begin_step()
    taking_part = participants(runtime, placements, runtime[Models].count)
    # Small collectives of whole parameters between those of sharded ones would only delay them.
    may_overlap = transaction.is_plain and not runtime.place.shards_parameters
    for placement in taking_part:
        if placement.replicas.begin_step(may_overlap):
            may_overlap = False
    for sharding in filter(None, [placement.sharding for placement in taking_part]):
        sharding.begin_tasks()
    return taking_part


def _run_tasks(
    runtime: Runtime,
    step: StepFunction[..., Any],
    transaction: StepTransaction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[Any]:
    if runtime.place.pp_size > 1:
        return _Pipeline(runtime, step).run(args, kwargs)
    results = _run_alone(runtime, step, args, kwargs)
    if runtime.place.cfg.reproducible_rng:
        transaction.restore_random_numbers()
    return results


def _prepare(
    runtime: Runtime,
    step: StepFunction[..., Any],
    transaction: StepTransaction,
    placements: Sequence[Placement],
    taking_part: Sequence[Placement],
) -> None:
    """Do everything that may still fail: average over microbatches and data-parallel ranks, and run hooks."""
    runtime.step.committing = True
    divisor = agreed_divisor(runtime, taking_part, hooked=transaction.is_hooked)
    transaction.end_tasks()
    check_left_out(runtime, placements, taking_part)  # before earlier gradients are added to those of this step
    for placement in taking_part:
        placement.replicas.check_gradients()
    for sharding in filter(None, [placement.sharding for placement in taking_part]):
        sharding.reduce_gradients()
    if (labels := runtime[StepWeights].labels) is not None and runtime[StepWeights].is_plain:
        warn_of_labels(runtime, step, labels)
    transaction.average(divisor.value, runtime.place.tensor_divisor)
    for placement in taking_part if divisor.hooked and runtime.place.shards_parameters else ():
        placement.replicas.average_for_hooks()  # hooks of shards see the mean, and so do those of the rest
    transaction.prepare(in_place=len(runtime.place.dp_ranks) == 1)
    for placement in taking_part:
        placement.replicas.reduce_gradients(divisor)


def _commit(runtime: Runtime, transaction: StepTransaction, taking_part: Sequence[Placement]) -> None:
    """Complete the step successfully, together with all other ranks."""
    if runtime.place.launch.world_size > 1:
        vote(runtime)
    transaction.finish()
    if runtime.place.launch.world_size > 1:
        for placement in taking_part:
            placement.replicas.end_step()
        for collectives in runtime[ReplicaCollectives].all:
            collectives.end_step()
        runtime.server.leave_step()
        logs.forward()
    runtime[_core.AloneRecorder].commit()
    runtime.step.voted = runtime.step.committing = False


def _finished(step: StepFunction[..., Any], result: Any) -> Any:
    if not step.detach_outputs:
        return result
    if isinstance(result, torch.Tensor):
        return result.detach()
    return map_tensors(result, torch.Tensor.detach, in_registered=True)


def _split(
    runtime: Runtime, step: StepFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[MicrobatchArguments]:
    """Return the arguments of each microbatch, and record the weight of each."""
    parts, runtime[StepWeights].counts = step.splitter.split(args, kwargs, runtime.step.num_microbatches)
    if is_compared(step.calls) and not step.warned_of_labels and torch.is_grad_enabled():
        runtime[StepWeights].labels = differing_labels(step.splitter, parts)
    return parts


def _run_alone(
    runtime: Runtime, step: StepFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    """Run the step in a pipeline of one rank: plain PyTorch, one microbatch after another."""
    runtime.begin_step_alone(step.name)
    runtime.step.entered = True
    if (offloaded := runtime.find(OffloadedActivations)) is not None:
        offloaded.begin_step(one_at_a_time=True)
    recorder, results = runtime[_core.AloneRecorder], []
    parts = _split(runtime, step, args, kwargs)
    recorder.begin(runtime.step.number)
    try:
        for runtime.step.microbatch, (part, keywords) in enumerate(parts):
            if runtime.place.cfg.reproducible_rng:
                process.seed(microbatch_seed(runtime, 0, runtime.step.microbatch))
            if offloaded is not None:
                offloaded.begins("forward", runtime.step.microbatch)
            results.append(_finished(step, in_microbatch(step.function, part, keywords)))
            recorder.next_microbatch()
        if (group := runtime.find(TensorGroup)) is not None:
            group.meet("the end of the step function")
    finally:
        recorder.end()
    return results


class _Pipeline:
    """One step of a pipeline of several ranks, from the perspective of one rank."""

    def __init__(self, runtime: Runtime, step: StepFunction[..., Any]) -> None:
        self.runtime = runtime
        self.step = step
        self.parts: list[MicrobatchArguments | None] = []
        self.results: list[Any] = []
        #: Checksums of this rank's batch, in steps in which ranks compare batches.
        self.batch: Fingerprints | None = None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        runtime = self.runtime
        runtime[Scheduling].begin_step(runtime, runtime[MemoryAccount].of_microbatches)
        state = StepState.capture()
        if is_compared(self.step.calls):
            self.batch = fingerprints(self.step.splitter.named(args, kwargs))
        try:
            if runtime.place.is_root:
                if self.step.calls == 1:
                    warn_of_assigned(runtime, self.step.name, self.step.function)
                self.parts = list(_split(runtime, self.step, args, kwargs))
                self.results = [None] * len(self.parts)
            in_order = one_at_a_time(runtime)
            runtime[Turn].attributes.hides = not in_order
            if (offloaded := runtime.find(OffloadedActivations)) is not None:
                offloaded.begin_step(one_at_a_time=in_order)
            runtime[WorkerPool].begin_step(state, self.run_root)
            runtime.server.begin_step(
                step=runtime.step.number,
                function=self.step.name,
                num_microbatches=runtime.step.num_microbatches,
                pipeline=runtime[Scheduling].text,
                active_microbatches=runtime.place.cfg.active_microbatches,
                one_at_a_time=in_order,
            )
            runtime.step.entered = True
            results = self.supervise()
            check_attributes(runtime)
            runtime[FrameTable].end_step()
            runtime[WorkerPool].end_step()
            return results
        finally:
            state.restore()
            self.parts = []

    def run_root(self, microbatch: int) -> None:
        """Run the root task of a microbatch on a worker: the step function itself."""
        task = running_task()
        assert task is not None, "root tasks run on workers"
        arguments, self.parts[microbatch] = self.parts[microbatch], None
        assert arguments is not None, "each microbatch is granted once"
        frame = root_frame(task)
        with in_frame(frame):
            result = self.step.function(*arguments[0], **arguments[1])
        frame.settle()
        task.ending = True
        self.results[microbatch] = _finished(self.step, bring(result))
        del result
        finish(task)
        close_calls(frame, ServerBackward(task, frame))
        for kept in all_kept(self.runtime[Models].placements):
            kept.check(task)
        self.settle_controls(task)

    def settle_controls(self, task: RunningTask) -> None:
        """Receive the answers to the control requests that this microbatch sent without waiting."""
        requests, self.runtime[Models].pending_controls = self.runtime[Models].pending_controls, []
        if requests:
            with self.runtime.progress.phase("waiting for the other ranks to take the partition over"):
                self.runtime.server.wait(task.worker, requests, "forward")
            for placement in self.runtime[Models].placements:
                placement.delivered()

    def supervise(self) -> list[Any]:
        """Start workers and serve control requests on the main thread, until the step has ended on all ranks."""
        runtime = self.runtime
        while True:
            event = runtime.server.supervise()
            if event.worker is not None:
                runtime[WorkerPool].start(event.worker)
            elif event.request is not None:
                runtime[Models].placement_of(event.request.model).serve_control(event.request)
            elif event.kind == _core.EventKind.STALL_REPORT:
                if runtime.observer is not None:
                    runtime.observer.request_report()
            elif event.kind == _core.EventKind.ROOT_DONE:
                sent = map_tensors(self.results, partial(deferring_large, runtime))
                weights = runtime[StepWeights]
                runtime.server.end_step(*encode((sent, self.batch, weights.given, weights.counts)))
                return self.results
            elif event.body is not None:
                results, batch, given, counts = decode_from(runtime, runtime.place.pp_ranks[0], *event.body)
                runtime[StepWeights].take_over(given, counts)
                assert isinstance(results, list), "the root sends one result per microbatch"
                if self.batch is not None and batch is not None:
                    warn_of_others(runtime, self.step, self.batch, batch)
                return results
            else:  # aborted locally
                raise runtime[WorkerPool].error or ShardwrightError("a task failed, and its error is not known")
