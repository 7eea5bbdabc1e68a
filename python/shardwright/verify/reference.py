"""Runs the same step in one process: all replicas' microbatches one after another, in plain PyTorch."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwright.data_parallel.weights import StepWeights
from shardwright.execution import process, reproducible
from shardwright.model.backward import weighted
from shardwright.model.distributed import DistributedModel
from shardwright.step.decorator import StepFunction
from shardwright.verify.keyed import KeyedCalls
from shardwright.verify.locate import ValueFlow
from shardwright.verify.measure import leaves, plain, tensors_in
from shardwright.verify.record import CallKey, ModuleRecord, Recorder
from shardwright.verify.whole import in_place_of

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Expected:
    """The results of one process for one replica, like those of the ranks in :class:`Evidence`.

    The weight is the sum of its microbatches' weights; None if there are none.
    """

    record: ModuleRecord = field(default_factory=ModuleRecord)
    results: list[list[tuple[str, Any]]] = field(default_factory=list)
    losses: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    weight: float | None = None


class WatchedFlow(Recorder):
    """Records calls, and also who used which tensor, who called whom, and who drew random numbers."""

    def __init__(self, paths: Mapping[nn.Module, str], microbatch: Callable[[], int], flow: ValueFlow) -> None:
        """Record observations in ``flow``."""
        super().__init__(paths, microbatch)
        self._flow = flow
        self._running: list[tuple[CallKey, Any]] = []

    def entered(self, path: str, args: Any) -> CallKey:
        """Record the tensors that the call uses, and its enclosing calls."""
        key = super().entered(path, args)
        self._flow.parents[key] = tuple(call for call, _ in self._running)
        self._running.append((key, _generators()))
        for number, tensor in enumerate(tensors_in(args)):
            users = _users(tensor)
            users.append(key)
            self._flow.users[key, -1 - number] = users
        return key

    def returned(self, path: str, output: Any) -> None:
        """Record the results of the call, and whether it drew random numbers."""
        key, before = self._running.pop()
        self._flow.drew[key] = _drawn(before, _generators())
        super().returned(path, output)
        for number, tensor in enumerate(tensors_in(output)):
            self._flow.users[key, number] = _users(tensor)


def _users(tensor: torch.Tensor) -> list[CallKey]:
    """Return the calls that received this tensor as an argument. The list is stored in the tensor."""
    users: list[CallKey] | None = getattr(tensor, "_shardwright_users", None)
    if users is None:
        users = []
        tensor._shardwright_users = users  # type: ignore[attr-defined]
    return users


def _generators() -> tuple[Any, Any, Any]:
    numpy = sys.modules.get("numpy")
    return process.random_state(), random.getstate(), None if numpy is None else numpy.random.get_state()


def _drawn(before: tuple[Any, Any, Any], after: tuple[Any, Any, Any]) -> tuple[str, ...]:
    (cpu, devices), python, numpy = before
    (cpu_now, devices_now), python_now, numpy_now = after
    found = []
    if not torch.equal(cpu.get_state(), cpu_now.get_state()) or any(
        not torch.equal(devices[d], devices_now[d]) for d in devices
    ):
        found.append("torch")
    if python != python_now:
        found.append("random")
    if numpy is not None and (numpy[2:] != numpy_now[2:] or not (numpy[1] == numpy_now[1]).all()):
        found.append("numpy")
    return tuple(found)


class Reference:
    """The whole models in this process, with the flow of values in the recorded runs."""

    def __init__(
        self,
        models: Sequence[DistributedModel],
        modules: Sequence[nn.Module],
        names: Sequence[str],
        device: torch.device,
    ) -> None:
        """Take ownership of the whole module of each model, with the prefix of its names, on a device."""
        self.models = models
        self.modules = [module.to(device) for module in modules]
        self.flow = ValueFlow()
        self._names = names
        self._runtime = models[0].placement.runtime
        self.paths = {
            part: prefix + path
            for prefix, module in zip(names, self.modules, strict=True)
            for path, part in module.named_modules()
        }

    def draw_as_the_ranks(self) -> None:
        """Draw random numbers as the ranks do."""
        for model, module in zip(self.models, self.modules, strict=True):
            ownership = model.placement.ownership
            if self._runtime.place.cfg.reproducible_rng:
                reproducible.install(self._runtime, module.modules())
            elif ownership is not None:
                KeyedCalls().install(dict(module.named_modules()), ownership.decision)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Mark the block as a step, because module calls have their own seeds only inside a step."""
        self._runtime.step.running = True
        try:
            yield
        finally:
            self._runtime.step.running = False

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return every parameter under each of its full names."""
        return self._named("named_parameters")

    def named_buffers(self) -> dict[str, torch.Tensor]:
        """Return every buffer under each of its full names."""
        return self._named("named_buffers")

    def _named(self, kind: str) -> dict[str, Any]:
        return {
            prefix + name: tensor
            for prefix, module in zip(self._names, self.modules, strict=True)
            for name, tensor in getattr(module, kind)(remove_duplicate=False)
        }

    def load_buffers(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set the buffers to these values."""
        with torch.no_grad():
            for name, buffer in self.named_buffers().items():
                buffer.copy_(values[name])

    def run(
        self, step: StepFunction[..., Any], parts: Sequence[CallArguments], seeds: Sequence[int | None], recorded: bool
    ) -> Expected:
        """Run the step function for each microbatch. Gradients accumulate in the modules.

        A microbatch without a seed continues the current sequence of random numbers. Recording module calls takes
        longer than the calls themselves.
        """
        expected = Expected()
        running = [0]

        weights = StepWeights(self._runtime.place.rank, len(parts))

        def backward(tensors: Any, grad_tensors: Any = None, *, weight: float | torch.Tensor | None = None) -> None:
            given = [tensor.detach().clone() for tensor in tensors_in(tensors)]
            expected.losses.setdefault(running[0], []).extend(given)
            number = weights.give(running[0], weight, tensors)
            torch.autograd.backward(tensors, weighted(tensors, grad_tensors, number))

        recorder = WatchedFlow(self.paths, lambda: running[0], self.flow)
        recording = recorder.recording() if recorded else nullcontext()
        with in_place_of(self.models, self.modules, backward), recording, self._in_step():
            for (args, kwargs), seed in zip(parts, seeds, strict=True):
                if seed is not None:
                    process.seed(seed)
                result = step.function(*args, **kwargs)
                expected.results.append([(path, plain(leaf)) for path, leaf in leaves(result)])
                del result
                running[0] += 1
        expected.weight = weights.total
        expected.record = recorder.record
        expected.buffers = {name: buffer.clone() for name, buffer in self.named_buffers().items()}
        return expected

    def take_gradients(self) -> dict[str, torch.Tensor | None]:
        """Return the accumulated gradients, and clear them."""
        found = {name: parameter.grad for name, parameter in self.named_parameters().items()}
        for module in self.modules:
            module.zero_grad(set_to_none=True)
        return found

    def mean(
        self,
        gradients: Sequence[Mapping[str, torch.Tensor | None]],
        weights: Sequence[float | None],
        microbatches: int,
    ) -> dict[str, torch.Tensor | None]:
        """Return the mean of replicas' gradients, also over microbatches if the model averages over them.

        Each replica brings the sum over its `microbatches`, and the sum of their weights if there are any. A gradient
        of None counts as zero if another replica has one.
        """
        weighted = any(weight is not None for weight in weights)
        divisor = math.fsum(weight or 0.0 for weight in weights) / len(weights) or 1.0 if weighted else microbatches
        mean: dict[str, torch.Tensor | None] = {}
        for prefix, model, module in zip(self._names, self.models, self.modules, strict=True):
            over = len(gradients) * (divisor if model.average_grads_across_microbatches else 1)
            for name, _ in module.named_parameters(remove_duplicate=False):
                present = [gradient for one in gradients if (gradient := one[prefix + name]) is not None]
                mean[prefix + name] = sum(present[1:], present[0]) / over if present else None
        return mean
