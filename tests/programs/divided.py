"""A program as one of the ranks of a job."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import shardwright as smp
import torch
from shardwright import _core
from shardwright.data_parallel.shards import ParameterShards
from shardwright.job.runtime import Runtime
from shardwright.model.sentinel import is_sentinel
from torch import nn

from tests.programs.blocks import Block
from tests.programs.log import log_of_run
from tests.programs.optimizers import OPTIMIZERS, Updating, update
from tests.programs.outcome import Left
from tests.programs.plain import MODES
from tests.programs.program import Program, weighed
from tests.programs.script import CHANGES, of_module

#: What each replica multiplies losses by: 1 in the mean, and nothing by which numbers would be rounded otherwise.
WEIGHTS = {1: (1.0,), 2: (4.0, -2.0)}


class Divided:
    """One of its jobs, with a folder for what it saves."""

    def __init__(self, program: Program, runtime: Runtime, folder: Path) -> None:
        self.program, self.runtime, self.folder = program, runtime, folder
        self.module, self.batch = program.start()  # anew on each: a copy of a scripted module has no parameters
        for path, rank in program.places.items():
            smp.set_partition(self.module.get_submodule(path), rank)
        passes = program.passes if program.replicas > 1 else 1
        if program.layout == "tensor":
            for linear in _linears(self.module):
                smp.set_tensor_parallelism(linear)
        model = self.model = smp.DistributedModel(self.module, backward_passes_per_step=passes)
        for path, strategy in program.checkpointed.items():
            smp.set_activation_checkpointing(self.module.get_submodule(path), strategy=strategy)
        left = self.left = Left({}, [], replica=smp.dp_rank())
        self.sent = Counter[str]()
        make = OPTIMIZERS[program.optimizer] if program.optimizer else Updating if program.sharded else None
        self.optimizer: Any = None if make is None else smp.DistributedOptimizer(make(model.parameters()))
        averages = any("average" in event[1] for event in program.events)
        self.averages = smp.AveragedModel(model) if averages else None
        weight = log_of_run[0].weight = WEIGHTS[program.replicas][left.replica]
        backward = model.backward if weight == 1 else weighed(model.backward, weight)
        self._hook()

        @smp.step(non_split_inputs=["step"])
        def train(batch: torch.Tensor, numbers: torch.Tensor, step: int) -> torch.Tensor:
            return program.step(model, batch, f"step {step}, microbatch {int(numbers[0])}", backward)

        @smp.step(non_split_inputs=["after"])
        def evaluate(batch: torch.Tensor, numbers: torch.Tensor, after: str) -> torch.Tensor:
            return program.evaluate(model, batch, f"evaluation after {after}, microbatch {int(numbers[0])}")

        self._train, self._evaluate = train, evaluate
        self.numbers = torch.arange(program.microbatches).repeat_interleave(program.rows)
        if program.static:
            cfg = runtime.place.cfg
            runtime.add(
                _core.Sites(
                    tensor_handles=cfg.tensor_handles,
                    fast_mode=cfg.fast_mode,
                    static_mode=cfg.static_mode,
                    static_steps=program.static_steps,
                )
            )

    def train(self, step: int) -> None:
        """A step."""
        self._note(self._train(self.program.batch_of(self.batch, step), self.numbers, step).outputs)

    def update(self, step: int) -> None:
        """An update of weights by the gradients of some steps."""
        self._keep_gradients(f" in step {step}")
        if self.optimizer is not None:
            self.optimizer.step()
        for parameter in () if self.optimizer is not None else self.model.local_parameters():
            if parameter.grad is not None:
                update(parameter, parameter.grad, elementwise=False)
        self.model.zero_grad()

    def evaluate(self, after: str, step: int, kind: str) -> None:
        """An evaluation."""
        self.model.eval()
        with MODES[kind]():
            batch = self.program.batch_of(self.batch, step)
            self._note(self._evaluate(batch, self.numbers, after).outputs)
        self.model.train()

    def do(self, step: int, word: str, *details: Any) -> None:
        """Another event."""
        if word in ("freeze", "unfreeze"):
            for parameter in of_module(details[0], dict(self.module.named_parameters())):
                parameter.requires_grad_(word == "unfreeze")
        elif word == "average":
            assert self.averages is not None
            self.averages.update_parameters()
        elif word == "averaged":
            assert self.averages is not None
            with self.averages.applied():
                self.evaluate(f"{step} with averages", step, "no_grad")
        elif word == "load":
            self.model.load_state_dict(self.program.other_state(details[0]))
        elif word == "state":
            state = {name: one for name, one in self.model.state_dict().items() if isinstance(one, torch.Tensor)}
            if smp.pp_rank() == 0:
                self.left.values |= {f"state before {step}: {name}": value.clone() for name, value in state.items()}
        elif word == "save":
            smp.save_checkpoint(self.folder, "middle", model=self.model, optimizer=self.optimizer)
        else:
            smp.resume_from_checkpoint(self.folder, "middle", model=self.model, optimizer=self.optimizer)

    def save(self, leg: int) -> None:
        """Save what the next job resumes."""
        averages = None if self.averages is None else self.averages.state_dict()
        smp.save_checkpoint(
            self.folder, f"leg{leg}", model=self.model, optimizer=self.optimizer, user_content={"averages": averages}
        )

    def resume(self, leg: int) -> None:
        """Go on from what another job saved."""
        content = smp.resume_from_checkpoint(self.folder, f"leg{leg}", model=self.model, optimizer=self.optimizer)
        if self.averages is not None:
            self.averages.load_state_dict(content["averages"])

    def finish(self) -> None:
        """Note what is there in the end."""
        if self.program.layout:
            state = self.model.state_dict()
            built = self.program.built()
            names = [name for name, _ in (*built.named_parameters(), *built.named_buffers())]
            if smp.pp_rank() == 0:
                self.left.values |= {f"value of {name}": state[name] for name in names}
            return
        held = (*self.module.named_parameters(), *self.module.named_buffers())
        if not self.program.updates:
            self._keep_gradients()
        self.left.values |= {f"value of {name}": tensor.detach() for name, tensor in held if not is_sentinel(tensor)}

    def _note(self, outputs: list[torch.Tensor]) -> None:
        self.left.losses += outputs
        self.left.steps.add(self.runtime.step.number)
        self.sent.update(self.runtime.server.stats()["step"]["sent"])
        self.left.sent = dict(self.sent)

    def _keep_gradients(self, when: str = "") -> None:
        if self.program.layout:  # of parts of parameters
            return
        for name, parameter in self.module.named_parameters():
            if not is_sentinel(parameter):
                is_share = self.optimizer is not None and self.runtime[ParameterShards].assigned(parameter) is not None
                gradient = None if parameter.grad is None else parameter.grad.clone()
                (self.left.shares if is_share else self.left.values)[f"gradient of {name}{when}"] = gradient

    def _hook(self) -> None:
        """Register hooks of parameters."""
        log, parameters = log_of_run[0], dict(self.module.named_parameters())

        def noted(name: str, gradient: torch.Tensor) -> None:
            log.hooks[f"parameter {name}"].append((self.runtime.step.number, gradient.detach().clone()))

        for name, kind in self.program.hooks:
            if kind == "note":
                parameters[name].register_hook(lambda gradient, name=name: noted(name, gradient))
            elif kind == "after":
                parameters[name].register_post_accumulate_grad_hook(_halve)
            else:
                parameters[name].register_hook(CHANGES[kind])


def _linears(module: nn.Module) -> list[nn.Linear]:
    """The linear layers that are inside nothing that computes with their weights itself."""
    found: list[nn.Linear] = []
    for child in module.children():
        if type(child) is nn.Linear:
            found.append(child)
        elif isinstance(child, Block | nn.ModuleList | nn.Sequential):
            found += _linears(child)
    return found


def _halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)
