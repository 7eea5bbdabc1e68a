"""What was done with a model before it is wrapped, and the outputs that models of ``transformers`` collect.

An earlier life must leave nothing behind: hooks, flags, caches and tensors made on the way are as in plain PyTorch. It
is lived by the whole model too, since a forward may change buffers.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .problem import Models, Phase, Problem, StepBody, generator
from .reference import Whole

Modules = dict[str, nn.Module]
_FLAGS = ("output_hidden_states", "output_router_logits")


class _Looked(Whole):
    """A whole model in a step that computes no gradients."""

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        """Do nothing."""


def _run(problem: Problem, modules: Modules, phase: Phase, face: type[Whole], *, training: bool) -> None:
    for module in modules.values():
        module.train(training)
    batch = problem.batch(0, generator("an earlier life", 0, 0, 0))
    with torch.set_grad_enabled(training):
        phase.body({name: face(module) for name, module in modules.items()}, *batch)
    for module in modules.values():
        module.train()


def looked(problem: Problem, modules: Modules) -> Modules:
    """It was evaluated."""
    _run(problem, modules, problem.phases[0], _Looked, training=False)
    return modules


def collected(problem: Problem, modules: Modules) -> Modules:
    """It was evaluated, and told what it collects: then hooks are installed where it collects."""
    with_config = [part for module in modules.values() for part in module.modules() if hasattr(part, "config")]
    configs = {id(part.config): part.config for part in with_config}
    before = {(key, flag): getattr(config, flag, None) for key, config in configs.items() for flag in _FLAGS}
    for part in configs.values():
        ask(part)
    looked(problem, modules)
    for (key, flag), value in before.items():
        if value is not None:
            setattr(configs[key], flag, value)
    return modules


def trained(problem: Problem, modules: Modules) -> Modules:
    """It computed gradients, which were dropped."""
    phase = next((phase for phase in problem.phases if phase.training), problem.phases[0])
    _run(problem, modules, phase, Whole, training=phase.training)
    for module in modules.values():
        module.zero_grad()
    return modules


def copied(problem: Problem, modules: Modules) -> Modules:
    """It is a copy of one that collected."""
    return copy.deepcopy(collected(problem, modules))


def loaded(problem: Problem, modules: Modules) -> Modules:
    """It has the state of another one, after both were evaluated."""
    others = looked(problem, problem.build())
    for name, module in looked(problem, modules).items():
        module.load_state_dict(others[name].state_dict())
    return modules


#: By name; a case names one.
LIVES: dict[str, Callable[[Problem, Modules], Modules]] = {
    life.__name__: life for life in (looked, collected, trained, copied, loaded)
}


def ask(config: Any) -> None:
    """Ask a configuration of ``transformers`` for what its model collects, as far as it has the flags."""
    for flag in _FLAGS:
        if hasattr(config, flag):
            setattr(config, flag, True)


class _Collecting:
    """A model whose collected outputs are kept beside."""

    def __init__(self, model: Any, kept: list[Any]) -> None:
        self._model = model
        self._kept = kept

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._model(*args, **kwargs)
        if hasattr(output, "items"):
            self._kept.append({name: value for name, value in output.items() if _is_collected(value)})
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _is_collected(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(each, torch.Tensor) for each in value)


def _with_collected(body: StepBody) -> StepBody:
    """A step that returns, beside its outputs, all that its models collected."""

    @functools.wraps(body)
    def step(models: Models, *args: Any) -> Any:
        kept: list[Any] = []
        outputs = body({name: _Collecting(model, kept) for name, model in models.items()}, *args)
        return outputs, kept

    return step


def lived(problem: Problem, life: str | None, *, collects: bool) -> Problem:
    """The problem with models that have lived what ``life`` names, and, if it collects, with all they collect."""
    if life is None and not collects:
        return problem

    def build() -> Modules:
        modules = problem.build()
        if life is not None:
            modules = LIVES[life](problem, modules)
        if collects:
            for module in modules.values():
                for part in module.modules():
                    ask(getattr(part, "config", None))
        return modules

    phases = tuple(replace(phase, body=_with_collected(phase.body)) for phase in problem.phases)
    return replace(problem, build=build, phases=phases if collects else problem.phases)
