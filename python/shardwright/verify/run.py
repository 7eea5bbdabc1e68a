"""``smp.verify``: runs one step on all ranks and the same step in one process, and reports the differences."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardwright.data_parallel.reducer import GradientListener
from shardwright.errors import ConfigError, ShardwrightError, VerificationError
from shardwright.execution import process
from shardwright.execution.call import CallWatch, RemoteModule
from shardwright.execution.task import running_task
from shardwright.half_precision import half_dtype
from shardwright.job.runtime import Runtime, current_runtime
from shardwright.model.distributed import DistributedModel
from shardwright.model.models import Models
from shardwright.model.sentinel import is_sentinel
from shardwright.partition.observe import uncompiled
from shardwright.partition.preserve import copied_arguments, preserved_random_numbers
from shardwright.partition.tree import join_path
from shardwright.step.decorator import StepFunction
from shardwright.step.run import run_step
from shardwright.verify.compare import Comparison
from shardwright.verify.evidence import Evidence, EvidenceReader, inputs_of, serve
from shardwright.verify.keep import kept
from shardwright.verify.measure import leaves, plain, tensors_in
from shardwright.verify.record import Recorder
from shardwright.verify.report import Report
from shardwright.verify.whole import Build, built, whole_copy

_OPTIONS = ("reference", "tolerance", "raise_on_difference", "whole_batch")


def verify(
    step_function: Callable[..., Any],
    *args: Any,
    reference: Build | None = None,
    tolerance: float | None = None,
    raise_on_difference: bool = False,
    whole_batch: bool = True,
    **kwargs: Any,
) -> Report:
    """Run one step on all ranks and the same step in one process, and report the differences.

    Write it in place of a call of a step function: ``smp.verify(train_step, model, batch)``. Every rank of the job must
    call it, with the arguments that it would pass to the step function. The verification has no lasting effects:
    weights, gradients, buffers, random numbers and the number of steps are restored. However, a model that is not
    divided yet is divided by it.

    Rank 0 is the one process, and needs memory for the whole model, its gradients and one microbatch.

    Args:
        step_function: A function decorated with ``smp.step``.
        *args: Its arguments on this rank.
        reference: Builds the whole model, for use instead of a copy of the script's model: returns a module, or a list
            of modules for several models. Its weights are set to those of the distributed model.
        tolerance: The largest error allowed. The default is that of the coarsest dtype that the step computes with.
        raise_on_difference: Raise an error on every rank if anything departs.
        whole_batch: Also run the whole batch as one microbatch, and note differences in the gradients.
        **kwargs: Its keyword arguments.

    Returns:
        The report, the same on every rank.

    Raises:
        ConfigError: The job has ``fp16``, ``bf16`` or ``sharded_data_parallel_degree``, an argument is not allowed, the
            model cannot be copied, or modules of it are divided over tensor-parallel ranks.
        VerificationError: Something departs, and ``raise_on_difference`` is set.
    """
    runtime = current_runtime()
    if half_dtype(runtime.place.cfg) is not None:
        raise ConfigError(
            "smp.verify in a job with fp16 or bf16, whose roundings would hide what it looks for: verify the model in "
            "a job without them"
        )
    if runtime.place.shards_parameters:
        raise ConfigError(
            "smp.verify in a job with sharded_data_parallel_degree: it follows whole parameters through a step, and "
            "these are shards between steps; verify the model in a job without it"
        )
    step, args = _step_of(step_function, args)
    if runtime.step.running or running_task() is not None:
        raise ShardwrightError("smp.verify was called inside a step function")
    if tolerance is not None and not tolerance > 0:
        raise ConfigError(f"tolerance is {tolerance!r}; allowed: a positive number")
    models = runtime[Models].alive
    if not models:
        raise ConfigError("smp.verify needs a model: wrap it in smp.DistributedModel first")
    if any(model.placement.is_sharded for model in models):
        raise ConfigError(
            f"smp.verify with tensor_parallel_degree {len(runtime.place.tp_ranks)}: one process has no whole modules "
            "in the place of distributed ones; verify with tensor_parallel_degree 1, or without smp.tensor_parallelism"
        )
    with runtime.step.uncounted():
        report = Verification(runtime, step, models, args, kwargs).run(reference, tolerance, whole_batch)
    if raise_on_difference and not report.exact:
        raise VerificationError(str(report))
    return report


def _step_of(function: Any, args: tuple[Any, ...]) -> tuple[StepFunction[..., Any], tuple[Any, ...]]:
    if isinstance(function, functools.partial):  # a step function that is a method
        bound = getattr(function.func, "__self__", None)
        if isinstance(bound, StepFunction) and not function.keywords:
            function, args = bound, (*function.args, *args)
    if not isinstance(function, StepFunction):
        raise ConfigError(
            f"smp.verify was given {type(function).__qualname__} {getattr(function, '__name__', '')!r} first; allowed: "
            "a function decorated with smp.step, followed by its arguments"
        )
    taken = [name for name in inspect.signature(function.function).parameters if name in _OPTIONS]
    if taken:
        raise ConfigError(
            f"{function.name} has an argument {taken[0]!r}, which is an option of smp.verify; rename it, or verify a "
            "step function without it"
        )
    return function, args


class Verification:
    """One call of :func:`verify` on one rank, for all its models; prefixes make names of several models differ."""

    def __init__(
        self,
        runtime: Runtime,
        step: StepFunction[..., Any],
        models: list[DistributedModel],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Store the step to verify."""
        self.runtime = runtime
        self.models = models
        self.prefixes = ["" if len(models) == 1 else f"model {model.model_id}: " for model in models]
        self.step = step
        self.arguments = args, kwargs
        self._microbatch = -1
        #: Whether all replicas start from the buffers of the first.
        self.shares_buffers = all(model.placement.replicas.shares_buffers for model in models)

    def run(self, reference: Build | None, tolerance: float | None, whole_batch: bool) -> Report:
        """Run the step and compare. See :func:`verify`."""
        modules: list[nn.Module] = []
        problem: Exception | None = None
        with kept(self.runtime) as starts, uncompiled():
            if self.runtime.place.rank == 0:
                try:  # run the step first, because the other ranks are in it
                    models = self.models
                    modules = [whole_copy(one) for one in models] if reference is None else built(reference, models)
                except Exception as error:
                    problem = error
            evidence = self._step()
            for model, prefix in zip(self.models, self.prefixes, strict=True):
                start = starts.get(model.model_id)
                if start is not None:
                    evidence.start_parameters |= {prefix + name: value for name, value in start.parameters.items()}
                    evidence.start_buffers |= {prefix + name: value for name, value in start.buffers.items()}
        if self.runtime.place.rank > 0:
            return serve(self.runtime, evidence)
        reader = EvidenceReader(self.runtime, evidence)
        try:
            if problem is not None:
                raise problem
            with preserved_random_numbers(p for model in self.models for p in model.local_parameters()):
                report = Comparison(self, modules, reader).report(tolerance, whole_batch)
        except BaseException as error:
            reader.finish("failed", f"{type(error).__name__}: {error}")
            raise
        reader.finish("report", report)
        return report

    def _step(self) -> Evidence:
        """Run the step on all ranks, and return this rank's evidence."""
        runtime = self.runtime
        evidence = Evidence()
        args, kwargs = copied_arguments(*self.arguments)  # the step may write to them
        if runtime.place.is_root:
            evidence.inputs = inputs_of(args, kwargs) if len(runtime.place.dp_ranks) > 1 else []
            generator, devices = process.random_state()
            evidence.random = (str(torch.initial_seed()), generator.get_state(), devices)
        paths = {
            part: prefix + path
            for prefix, model in zip(self.prefixes, self.models, strict=True)
            for path, part in model.module.named_modules()
        }
        recorder = Recorder(paths, self._running_microbatch)
        before = _requests(runtime)
        with recorder.recording(), self._watched_backward(evidence), self._watched_requests(recorder):
            run_step(runtime, self._watched_step(evidence), args, kwargs)
        after = _requests(runtime)
        evidence.record = recorder.record
        evidence.requests = (after[0] - before[0], after[1] - before[1])
        self._collect(evidence)
        return evidence

    def _collect(self, evidence: Evidence) -> None:
        """Collect the effects of the step on this rank, before they are undone."""
        for prefix, model in zip(self.prefixes, self.models, strict=True):
            groups: dict[int, list[str]] = {}
            for name, parameter in model.module.named_parameters(remove_duplicate=False):
                if is_sentinel(parameter):
                    continue
                groups.setdefault(id(parameter), []).append(prefix + name)
                gradient = parameter.grad
                if gradient is not None:  # copied, because a view of a bucket is overwritten before the comparison
                    gradient = gradient.clone() if gradient._is_view() else gradient.detach()
                evidence.gradients[prefix + name] = gradient
                if _has_hooks(parameter):
                    evidence.hooked.append(prefix + name)
            evidence.groups += groups.values()
            for name, buffer in model.module.named_buffers(remove_duplicate=False):
                if not is_sentinel(buffer):
                    evidence.buffers[prefix + name] = buffer.detach().clone()

    def _running_microbatch(self) -> int:
        task = running_task()
        return self._microbatch if task is None else task.microbatch

    def _watched_step(self, evidence: Evidence) -> StepFunction[..., Any]:
        """Return the step function, under its own name, recording its result for each microbatch."""
        watched = copy.copy(self.step)
        function = self.step.function

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._microbatch += 1
            result = function(*args, **kwargs)
            evidence.results[self._running_microbatch()] = [(path, plain(leaf)) for path, leaf in leaves(result)]
            return result

        watched.function = noted
        watched.detach_outputs = True
        return watched

    @contextlib.contextmanager
    def _watched_requests(self, recorder: Recorder) -> Iterator[None]:
        """Record the arguments of calls to other ranks."""
        prefixes = {model.model_id: prefix for prefix, model in zip(self.prefixes, self.models, strict=True)}

        def called(target: RemoteModule, args: Any, children: tuple[int, int] | None) -> None:
            placement = self.runtime[Models].placement_of(target.model_id)
            path = placement.name_of(target.module_id)
            if children is not None:
                path = join_path(path, list(placement.module_of(target.module_id)._modules)[children[0]])
            recorder.entered(prefixes[target.model_id] + path, args)

        self.runtime[CallWatch].on_call = called
        try:
            yield
        finally:
            self.runtime[CallWatch].on_call = None

    @contextlib.contextmanager
    def _watched_backward(self, evidence: Evidence) -> Iterator[None]:
        """Record the tensors given to ``model.backward``."""
        with contextlib.ExitStack() as stack:
            for model in self.models:
                original = model.backward

                def noted(tensors: Any, grad_tensors: Any = None, original: Any = original) -> None:
                    given = [tensor.detach().clone() for tensor in tensors_in(tensors)]
                    evidence.losses.setdefault(self._running_microbatch(), []).extend(given)
                    original(tensors, grad_tensors)

                model.__dict__["backward"] = noted
                stack.callback(model.__dict__.pop, "backward")
            yield


def _requests(runtime: Runtime) -> tuple[int, int]:
    if runtime.place.pp_size == 1:
        return 0, 0
    sent = runtime.server.stats()["total"]["sent"]
    return sent["forward"], sent["backward"]


def _has_hooks(parameter: nn.Parameter) -> bool:
    hooks: Sequence[Any] = [
        *(parameter._backward_hooks or {}).values(),
        *(parameter._post_accumulate_grad_hooks or {}).values(),
    ]
    return any(not isinstance(hook, GradientListener) for hook in hooks)
