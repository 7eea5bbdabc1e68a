"""The small script of a cell: it trains a model by the old import path, beside plain PyTorch."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import smdistributed.modelparallel.torch as smp
import torch
from torch import nn

from tests.compat.cells.cell import Cell

_UPDATES, _ROWS, _SCALE = 2, 8, 0.05


class Layer(nn.Module):
    """A layer that takes what it returns, by itself or as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, inputs: Any) -> Any:
        hidden = inputs[0] if isinstance(inputs, tuple) else inputs
        outputs = torch.tanh(self.linear(hidden))
        return (outputs,) if isinstance(inputs, tuple) else outputs


class Model(nn.Module):
    """Some layers in a sequence, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(4)))
        self.head = nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(inputs)
        outputs: torch.Tensor = self.head(hidden[0] if isinstance(hidden, tuple) else hidden)
        return outputs


def _batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(_ROWS, 8, generator=generator), torch.randn(_ROWS, 2, generator=generator)


def _loss(outputs: torch.Tensor, targets: torch.Tensor, scale: Any) -> torch.Tensor:
    return (outputs.float() - targets).square().mean() * scale


class Script:
    """A job's model and optimizer, made as a cell says, and the same in plain PyTorch."""

    def __init__(self, cell: Cell) -> None:
        """Make both; what a cell is refused for is raised here, or by ``smp.init`` before."""
        self.cell, given = cell, cell.arguments
        self.has_begun = False
        with smp.model_creation(**_creation(given.get("model_creation", {}))):
            torch.manual_seed(1)
            module = Model()
        self.plain = copy.deepcopy(module)
        self.rate = 1.0
        self.model = smp.DistributedModel(module, **given.get("DistributedModel", {}))
        if "set_activation_checkpointing" in given:
            layers = self.model.get_module().layers
            smp.set_activation_checkpointing(layers, **given["set_activation_checkpointing"])
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.rate)
        self.optimizer = smp.DistributedOptimizer(optimizer, **given.get("DistributedOptimizer", {}))
        step = given.get("step", {})
        self._scale = torch.tensor([_SCALE]) if "non_split_inputs" in step else _SCALE

        def train(model: Any, inputs: torch.Tensor, targets: torch.Tensor, scale: Any) -> torch.Tensor:
            loss = _loss(model(inputs), targets, scale)
            model.backward(loss)
            return loss

        def evaluate(model: Any, inputs: torch.Tensor, targets: torch.Tensor, scale: Any) -> torch.Tensor:
            return _loss(model(inputs), targets, scale)

        decorate = smp.step(**step) if step else smp.step
        self._train, self._evaluate = decorate(train), decorate(evaluate)

    def run(self) -> None:
        """Do what the cell asks for, and compare.

        Raises:
            AssertionError: Something differs from plain PyTorch.
        """
        self.has_begun = True
        if smp.state.cfg.pipeline != "_only_forward":
            for update in range(_UPDATES):
                self._update(update)
        self._compare("evaluation", self.evaluated(), float(_loss(self.plain(_batch(99)[0]), _batch(99)[1], _SCALE)))
        if "save_checkpoint" in self.cell.arguments:
            self._save_and_resume(dict(self.cell.arguments["save_checkpoint"]))

    def evaluated(self) -> float:
        """The loss of a batch that is not trained on."""
        self.model.eval()
        with torch.no_grad():
            loss = self._evaluate(self.model, *_batch(99), self._scale).reduce_mean()
        self.model.train()
        return float(loss)

    def _update(self, update: int) -> None:
        given = self.cell.arguments.get("DistributedModel", {})
        passes, factor = given.get("backward_passes_per_step", 1), 1.0
        if not given.get("average_grads_across_microbatches", True):
            factor = float(smp.state.cfg.microbatches)
        self.optimizer.zero_grad()
        self.plain.zero_grad()
        for number in range(passes):
            batch = _batch(10 * update + number)
            loss = self._train(self.model, *batch, self._scale).reduce_mean()
            expected = _loss(self.plain(batch[0]), batch[1], _SCALE)
            expected.backward()  # type: ignore[no-untyped-call]
            self._compare(f"loss {update}.{number}", float(loss.detach()), expected.item())
        self.optimizer.step()
        with torch.no_grad():
            for parameter in self.plain.parameters():
                if parameter.grad is not None and not getattr(self.optimizer, "overflow", False):
                    parameter -= self.rate * factor * parameter.grad

    def _save_and_resume(self, saving: dict[str, Any]) -> None:
        with_optimizer, partial = saving.pop("with_optimizer", True), saving["partial"]
        folder, before = os.environ["COMPAT_CELLS"], self.evaluated()
        saved = {"model": self.model, **({"optimizer": self.optimizer} if with_optimizer else {})}
        tag = f"{self.cell.layout}-{partial}-{with_optimizer}-{len(saving)}"
        smp.save_checkpoint(folder, tag, user_content={"steps": 3}, **saved, **saving)
        smp.barrier()
        self._update(7)
        assert self.evaluated() != before, "an update changes the loss"
        content = smp.resume_from_checkpoint(folder, tag, partial=partial, load_optimizer=with_optimizer)
        assert content["steps"] == 3
        self._compare("loss after resuming", self.evaluated(), before, 1e-6)

    def _compare(self, what: str, found: float, expected: float, bar: float | None = None) -> None:
        config = self.cell.config
        half = config.get("fp16") or config.get("bf16") or config.get("fp16_params")
        bar = (3e-2 if half else 2e-5) if bar is None else bar
        assert abs(found - expected) <= bar * abs(expected), f"{what} is {found}, and {expected} in plain PyTorch"


def _creation(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(torch, one) if name == "dtype" else one for name, one in given.items()}
