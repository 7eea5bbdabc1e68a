"""One process that trains the whole model on the batches of all ranks, in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from shardwright.nn.entries import built_in
from torch import nn

from .problem import Batch, Problem, generator

#: As of PyTorch's SGD without momentum, of both models.
LEARNING_RATE = 0.01
STEPS = 5

Tensors = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Samples:
    """The batches of a step.

    Attributes:
        problem: The name of the problem.
        sizes: The samples in each microbatch of each distinct batch.
        microbatches: How many each batch has.
    """

    problem: str
    sizes: tuple[int, ...]
    microbatches: int

    def batch(self, problem: Problem, step: int, index: int) -> Batch:
        """One of the distinct batches."""
        return problem.batch(self.sizes[index] * self.microbatches, generator(self.problem, step, index))


@dataclass
class Expected:
    """What training gives.

    Attributes:
        start: The whole model before it.
        losses: By step, batch and microbatch.
        gradients: By step, those of the parameters of the whole model.
        weights: After the last step.
    """

    start: nn.Module
    losses: list[list[list[torch.Tensor]]] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    weights: Tensors = field(default_factory=dict)


def start(problem: Problem) -> nn.Module:
    """The whole model before training, the same on every rank."""
    torch.manual_seed(7)
    return problem.whole()


def train(problem: Problem, samples: Samples) -> Expected:
    """Train on the mean of all batches' losses, each the mean of its microbatches'."""
    whole = start(problem)
    expected = Expected(start(problem))
    optimizer = torch.optim.SGD(whole.parameters(), lr=LEARNING_RATE)
    parts = samples.microbatches
    for step in range(STEPS):
        optimizer.zero_grad()
        expected.losses.append([])
        for index in range(len(samples.sizes)):
            batch = samples.batch(problem, step, index)
            losses = [
                problem.loss(whole, {name: one.chunk(parts)[part] for name, one in batch.items()})
                for part in range(parts)
            ]
            (sum(losses[1:], losses[0]) / (parts * len(samples.sizes))).backward()
            expected.losses[-1].append([loss.detach() for loss in losses])
        expected.gradients.append(
            {name: None if p.grad is None else p.grad.clone() for name, p in whole.named_parameters()}
        )
        optimizer.step()
    expected.weights = {name: p.detach().clone() for name, p in whole.named_parameters()}
    return expected


def renamed(whole: nn.Module, values: Tensors, replaced: Mapping[str, type[nn.Module]]) -> Tensors:
    """Values of the whole model's parameters under the names of the divided one, not yet cut.

    Args:
        whole: The model.
        values: A gradient or weight for each parameter. In replaced modules a missing gradient counts as zero.
        replaced: The names of the replaced modules, and the classes of the originals.
    """
    shadow = copy.deepcopy(whole)
    with torch.no_grad():
        for name, parameter in shadow.named_parameters():
            value = values[name]
            parameter.zero_() if value is None else parameter.copy_(value)
    result = {
        name: value
        for name, value in values.items()
        if not any(name.startswith(f"{path}." if path else "") for path in replaced)
    }
    for path, cls in replaced.items():
        entry = built_in(cls)
        assert entry is not None, "it was replaced"
        assert entry.weights_hook is not None, "all entries of the library have one"
        weights = entry.weights_hook(shadow.get_submodule(path))
        prefix = f"{path}." if path else ""
        result |= {f"{prefix}{own}": weight.detach() for own, weight in weights.items()}
    return result
