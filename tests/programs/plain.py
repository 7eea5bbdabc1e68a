"""A program in plain torch, microbatch after microbatch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.swa_utils import get_swa_multi_avg_fn

from tests.programs.log import Log
from tests.programs.optimizers import OPTIMIZERS, update
from tests.programs.outcome import Left
from tests.programs.program import Program
from tests.programs.script import CHANGES, of_module

MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


class Plain:
    """One of its jobs."""

    def __init__(self, program: Program, log: Log, left: Left, rounding: int | None) -> None:
        """With the number of a rounding on inputs that differ by it."""
        self.program, self.log, self.left = program, log, left
        self.model, batch = program.start()
        if rounding is not None:
            signs = torch.randn(batch.shape, generator=torch.Generator().manual_seed(rounding), dtype=batch.dtype)
            batch = batch * (1 + torch.finfo(batch.dtype).eps * signs.sign())
        self.batch = batch
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = OPTIMIZERS[program.optimizer](self.parameters.values()) if program.optimizer else None
        self.averages, self.averaged = self._values(), 0
        self.saved: Any = None

    def train(self, step: int) -> None:
        """A step. Hooks of parameters run once, on the mean over its microbatches."""
        before = {name: parameter.grad for name, parameter in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.grad = None
        for number, part in enumerate(self._parts(step)):
            index = f"step {step}, microbatch {number}"
            self.left.losses.append(self.program.step(self.model, part, index, torch.autograd.backward))
            self.log.end_microbatch()
        for name, parameter in self.parameters.items():
            gradient, earlier = parameter.grad, before[name]
            if gradient is None:
                parameter.grad = earlier
                continue
            gradient = gradient / self.program.microbatches
            kinds = [kind for hooked, kind in self.program.hooks if hooked == name]
            for kind in kinds:
                if kind == "note":
                    self.log.hooks[f"parameter {name}"].append((0, gradient.clone()))
                gradient = CHANGES[kind](gradient) if kind in CHANGES else gradient
            parameter.grad = gradient if earlier is None else earlier + gradient
            if "after" in kinds:
                parameter.grad = parameter.grad * 0.5

    def update(self, step: int) -> None:
        """An update of weights by the gradients of some steps."""
        for name, parameter in self.parameters.items():
            self.left.values[f"gradient of {name} in step {step}"] = parameter.grad
            if parameter.grad is not None and self.optimizer is None:
                update(parameter, parameter.grad, self.program.sharded)
        if self.optimizer is not None:
            self.optimizer.step()
        for parameter in self.parameters.values():
            parameter.grad = None

    def evaluate(self, after: str, step: int, kind: str) -> None:
        """An evaluation."""
        self.model.eval()
        with MODES[kind]():
            for number, part in enumerate(self._parts(step)):
                index = f"evaluation after {after}, microbatch {number}"
                self.left.losses.append(self.program.evaluate(self.model, part, index))
                self.log.end_microbatch()
        self.model.train()

    def do(self, step: int, word: str, *details: Any) -> None:
        """Another event."""
        if word in ("freeze", "unfreeze"):
            for parameter in of_module(details[0], self.parameters):
                parameter.requires_grad_(word == "unfreeze")
        elif word == "average":
            self._average()
        elif word == "averaged":
            with self._applied():
                self.evaluate(f"{step} with averages", step, "no_grad")
        elif word == "load":
            self.model.load_state_dict(self.program.other_state(details[0]))
        elif word == "state":
            state = self.model.state_dict()
            self.left.values |= {f"state before {step}: {name}": value.clone() for name, value in _tensors(state)}
        elif word == "save":
            self.saved = self.save()
        else:
            self.resume(self.saved, averages=False)

    def save(self) -> Any:
        """What the next job resumes."""
        optimizer = None if self.optimizer is None else self.optimizer.state_dict()
        return copy.deepcopy((self.model.state_dict(), optimizer, self.averages, self.averaged))

    def resume(self, saved: Any, averages: bool = True) -> None:
        """Go on from there."""
        state, optimizer, values, averaged = copy.deepcopy(saved)
        self.model.load_state_dict(state)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(optimizer)
        if averages:
            self.averages, self.averaged = values, averaged

    def finish(self) -> None:
        """Note what is there in the end."""
        if not self.program.updates:
            self.left.values |= {f"gradient of {name}": one.grad for name, one in self.parameters.items()}
        held = (*self.parameters.items(), *self.model.named_buffers())
        self.left.values |= {f"value of {name}": tensor.detach() for name, tensor in held}

    def _parts(self, step: int) -> tuple[torch.Tensor, ...]:
        return self.program.batch_of(self.batch, step).chunk(self.program.microbatches)

    def _values(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self._held().items()}

    def _held(self) -> dict[str, torch.Tensor]:
        return {name: one.data for name, one in (*self.model.named_parameters(), *self.model.named_buffers())}

    def _average(self) -> None:
        """As ``torch.optim.swa_utils.AveragedModel`` does it, by its function; buffers are those of now."""
        held = self._held()
        weights = [name for name in self.averages if name in self.parameters and self.averaged]
        for name, average in self.averages.items():
            if name not in weights:
                average.copy_(held[name])
        if weights:
            mean, count = get_swa_multi_avg_fn(), torch.tensor(self.averaged)  # type: ignore[no-untyped-call]
            mean([self.averages[name] for name in weights], [held[name] for name in weights], count)
        self.averaged += 1

    @contextmanager
    def _applied(self) -> Iterator[None]:
        kept = self._values()
        for name, one in self._held().items():
            one.copy_(self.averages[name])
        yield
        self.averages = self._values()
        for name, one in self._held().items():
            one.copy_(kept[name])


def _tensors(state: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return [(name, value) for name, value in state.items() if isinstance(value, torch.Tensor)]
