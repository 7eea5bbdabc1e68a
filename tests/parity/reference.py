"""One process that runs all replicas' microbatches one after another, in plain PyTorch."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .problem import Phase, Problem

Gradients = dict[str, torch.Tensor | None]


class Whole:
    """A whole model with the face of a distributed one."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        torch.autograd.backward(tensors, grad_tensors)


@dataclass
class Expected:
    """What one phase gives.

    Attributes:
        outputs: By replica and microbatch, what the step function returns.
        gradients: By replica, every parameter's gradient afterwards.
        buffers: By replica, every buffer afterwards.
        trained: Whether there are gradients to compare.
    """

    trained: bool

    outputs: list[list[Any]] = field(default_factory=list)
    gradients: list[Gradients] = field(default_factory=list)
    buffers: list[dict[str, torch.Tensor]] = field(default_factory=list)


class Reference:
    """The models of a problem, whole, with what each data-parallel replica would hold of gradients and buffers."""

    def __init__(self, problem: Problem, replicas: int, microbatches: int, average: bool, shared_buffers: bool) -> None:
        self.problem = problem
        self.replicas = replicas
        self.microbatches = microbatches
        self.average = average
        self.shared_buffers = shared_buffers
        self.modules = problem.build()
        for module in self.modules.values():
            _turn_caches_off(module)
        self.models = {name: Whole(module) for name, module in self.modules.items()}
        self.gradients: list[Gradients] = [dict.fromkeys(self.parameters()) for _ in range(replicas)]
        self.buffers = [self._copied_buffers() for _ in range(replicas)]
        self.passes, self.has_trained = 0, False
        self.optimizers = {name: problem.optimizer(module) for name, module in self.modules.items()}
        scheduler = problem.scheduler
        self.schedulers = {} if scheduler is None else {n: scheduler(o) for n, o in self.optimizers.items()}

    def parameters(self) -> dict[str, nn.Parameter]:
        return {f"{m}.{n}": p for m, module in self.modules.items() for n, p in module.named_parameters()}

    def named_buffers(self) -> dict[str, torch.Tensor]:
        return {f"{m}.{n}": b for m, module in self.modules.items() for n, b in module.named_buffers()}

    def _copied_buffers(self) -> dict[str, torch.Tensor]:
        return {name: buffer.clone() for name, buffer in self.named_buffers().items()}

    def zero(self, models: tuple[str, ...]) -> None:
        for gradients in self.gradients:
            for name in gradients:
                if name.partition(".")[0] in models:
                    gradients[name] = None

    def run(self, phase: Phase, batches: list[tuple[Any, ...]]) -> Expected:
        """Run a phase for every replica's batch."""
        expected = Expected(phase.training)
        for replica, batch in enumerate(batches):
            # As in DistributedDataParallel, training and what comes after it start from the first replica's buffers.
            shared = self.shared_buffers and (phase.training or self.has_trained)
            self._load_buffers(self.buffers[0 if shared else replica])
            with torch.set_grad_enabled(phase.training):
                expected.outputs.append(
                    [_detached(phase.body(self.models, *part)) for part in self._parts(phase, batch)]
                )
            expected.buffers.append(self._copied_buffers())
            if phase.training:
                self._collect(self.gradients[replica])
        self.buffers, self.has_trained = expected.buffers, phase.training
        self.passes += 1
        if phase.training and self.passes % self.problem.passes_per_step == 0:
            self._average_over_replicas()
        expected.gradients = [dict(gradients) for gradients in self.gradients]
        return expected

    def _load_buffers(self, saved: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self.named_buffers().items():
                buffer.copy_(saved[name])

    def _parts(self, phase: Phase, batch: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        names = list(inspect.signature(phase.body).parameters)[1:]
        columns = [
            [value] * self.microbatches
            if name in phase.whole
            else value.chunk(self.microbatches, phase.axes.get(name, 0))
            for name, value in zip(names, batch, strict=False)
        ]
        return list(zip(*columns, strict=True))

    def _collect(self, gradients: Gradients) -> None:
        for name, parameter in self.parameters().items():
            new, parameter.grad = parameter.grad, None
            if new is None:
                continue
            new = new.to_dense() / (self.microbatches if self.average else 1)
            earlier = gradients[name]
            gradients[name] = new if earlier is None else earlier + new

    def _average_over_replicas(self) -> None:
        for name in self.parameters():
            present = [g for gradients in self.gradients if (g := gradients[name]) is not None]
            mean = sum(present[1:], present[0]) / self.replicas if present else None
            for gradients in self.gradients:
                gradients[name] = mean

    def update(self, models: tuple[str, ...]) -> list[torch.Tensor | None]:
        """Step the optimizers of these models with the first replica's gradients, which all share by then.

        Returns:
            The norm of each model's gradients, where they are clipped.
        """
        norms: list[torch.Tensor | None] = []
        for name, parameter in self.parameters().items():
            if name.partition(".")[0] in models:
                parameter.grad = self.gradients[0][name]
        for model in models:
            clip = self.problem.clip
            parameters = self.modules[model].parameters()
            norms.append(None if clip is None else nn.utils.clip_grad_norm_(parameters, clip))
            self.optimizers[model].step()
            if model in self.schedulers:
                self.schedulers[model].step()
        for parameter in self.parameters().values():
            parameter.grad = None
        return norms


def _turn_caches_off(module: nn.Module) -> None:
    """As the library does for training: keys from a cache lie otherwise in memory, and in float32 round otherwise."""
    for part in module.modules():
        config = getattr(part, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


def _detached(value: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, value)
