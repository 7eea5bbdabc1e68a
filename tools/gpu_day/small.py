"""A small model in two stages, one for each of two ranks, beside the same model in one process."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

MICROBATCHES = 4
#: The devices on which results of the second stage said that they are, before anything used their values.
seen_devices: list[str] = []
#: By stage, what happens on its rank the next time that it runs, once.
actions: dict[str, Callable[[torch.Tensor], Any]] = {}


class Stage(nn.Module):
    """Two layers, and a place where something may happen."""

    def __init__(self, width: int, name: str) -> None:
        """Make the layers."""
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.name = name

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute, once what is in :data:`actions` has happened."""
        if self.name in actions:
            actions.pop(self.name)(inputs)
        return inputs + self.outer(torch.tanh(self.inner(inputs)))


class Stages(nn.Module):
    """Two stages, whose results are used several times by the whole."""

    def __init__(self, width: int) -> None:
        """Make the stages."""
        super().__init__()
        self.first, self.second = Stage(width, "first"), Stage(width, "second")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The loss; both results are used beyond the stage that takes them."""
        first = self.first(inputs)
        second = self.second(first)
        seen_devices.append(str(second.device))
        return (second * first).tanh().mean() + second.square().mean()


class Divided:
    """The model divided over the ranks of this job, and the same model whole.

    Attributes:
        net: The model that is divided.
        whole: The same, in this process.
    """

    def __init__(self, device: str, width: int, **keys: Any) -> None:
        """Join the job, and build both.

        Args:
            device: ``"cuda"`` or ``"cpu"``.
            width: Of the layers.
            keys: Of the configuration.
        """
        import shardwright as smp

        degree = int(os.environ["WORLD_SIZE"])
        given = {"pipeline_parallel_degree": degree, "microbatches": MICROBATCHES, "skip_tracing": True}
        smp.init(given | {"auto_partition": False, "default_partition": 0} | keys)
        torch.manual_seed(0)
        self.net = Stages(width).double().to(device)
        self.whole = copy.deepcopy(self.net)
        if degree > 1:
            smp.set_partition(self.net.second, 1)
        self.model: Any = smp.DistributedModel(self.net)
        self.batches = torch.Generator().manual_seed(1)
        self._shape, self._device = (4 * MICROBATCHES, width), device

        @smp.step
        def train(model: Any, inputs: torch.Tensor) -> torch.Tensor:
            loss = model(inputs)
            model.backward(loss)
            return loss.detach()

        self.train: Any = train

    def draw(self) -> torch.Tensor:
        """The next batch, on the device; the same on every rank."""
        return torch.randn(*self._shape, generator=self.batches, dtype=torch.float64).to(self._device)

    def difference(self, inputs: torch.Tensor) -> float:
        """The largest difference of a gradient from that of the whole model, relative to the largest of that gradient.

        Args:
            inputs: The batch of the step that has run.
        """
        self.whole.zero_grad()
        for microbatch in inputs.chunk(MICROBATCHES):
            (self.whole(microbatch) / MICROBATCHES).backward()
        expected = {name: parameter.grad for name, parameter in self.whole.named_parameters()}
        worst = 0.0
        for name, parameter in self.model.local_named_parameters():
            wanted, found = expected[name], parameter.grad
            if wanted is None or found is None:
                raise RuntimeError(f"{name} has no gradient")
            worst = max(worst, float((found - wanted).abs().max() / wanted.abs().max()))
        return worst

    def exact_step(self) -> float:
        """Run a step from zeroed gradients; :meth:`difference` of it."""
        self.model.zero_grad()
        inputs = self.draw()
        self.train(self.model, inputs)
        return self.difference(inputs)


#: The most that gradients in float64 may differ by: the order of sums is another.
EXACT = 1e-10
