"""Runs a program in plain torch, over ranks that are threads, and as a rank of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import shardwright as smp
import torch
from shardwright import _core
from shardwright.data_parallel.shards import ParameterShards
from shardwright.job.runtime import Runtime
from shardwright.model.sentinel import is_sentinel
from shardwright.partition.structure import structural_joins
from shardwright.partition.trace import trace_forward
from shardwright.partition.tree import ModelTree
from torch import nn

from tests.frames.job import Job
from tests.programs.blocks import Block
from tests.programs.log import Log, log_of_run
from tests.programs.outcome import Left, Outcome, merged
from tests.programs.program import Program, Updating, update, weighed
from tests.state.keepers import Keeper, plain

#: Longer than any program takes, also on a machine that has much else to do.
SECONDS = 150.0
#: What each replica multiplies losses by: 1 in the mean, and nothing by which numbers would be rounded otherwise.
WEIGHTS = {1: (1.0,), 2: (4.0, -2.0)}
_MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
#: Attributes of blocks that they may change.
_OF_BLOCKS = ("number", "level", "past")


def state_of(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, Any]:
    """What modules keep beside buffers, by name."""
    found = {}
    for path, module in modules:
        names: Iterable[str] = ()
        if isinstance(module, Block):
            names = [name for name in _OF_BLOCKS if hasattr(module, name)]
        elif isinstance(module, Keeper):
            names = [name for name in vars(module) if not name.startswith("_") and name not in ("training", "forward")]
        found |= {f"{path}.{name}": plain(vars(module)[name]) for name in names}
    return found


def run_plain(program: Program, rounding: int | None = None) -> tuple[Outcome, Log]:
    """Run in plain torch, microbatch after microbatch; with the number of a rounding on inputs that differ by it."""
    log = log_of_run[0] = Log(plain=True)
    model, batch = program.start()
    if rounding is not None:
        signs = torch.randn(batch.shape, generator=torch.Generator().manual_seed(rounding), dtype=batch.dtype).sign()
        batch = batch * (1 + torch.finfo(batch.dtype).eps * signs)
    parameters = dict(model.named_parameters())
    left = Left({}, [], steps={0})
    for step in range(program.steps):
        before = {name: parameter.grad for name, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = None
        parts = (
            batch.roll(step, 0).chunk(program.microbatches) if program.updates else batch.chunk(program.microbatches)
        )
        for number, part in enumerate(parts):
            index = f"step {step}, microbatch {number}"
            left.losses.append(program.step(model, part, index, torch.autograd.backward))
            log.end_microbatch()
        for name, parameter in parameters.items():
            gradient = None if parameter.grad is None else parameter.grad / program.microbatches
            earlier = before[name]
            if program.updates:
                left.values[f"gradient of {name} in step {step}"] = gradient
                parameter.grad = None
                if gradient is not None:
                    update(parameter, gradient, program.sharded)
            else:
                parameter.grad = gradient if earlier is None else earlier if gradient is None else earlier + gradient
        for kind in program.evaluations_after(step):
            model.eval()
            with _MODES[kind]():
                for number, part in enumerate(parts):
                    index = f"evaluation after {step} in {kind}, microbatch {number}"
                    left.losses.append(program.evaluate(model, part, index))
                    log.end_microbatch()
            model.train()
    if not program.updates:
        left.values |= {f"gradient of {name}": parameter.grad for name, parameter in parameters.items()}
    left.values |= {f"value of {n}": tensor.detach() for n, tensor in (*parameters.items(), *model.named_buffers())}
    left.values |= state_of(model.named_modules())
    log.ran = [name for name, module in model.named_modules() if module in log.modules]
    left.add_log(log)
    return merged([left]), log


def joins_of(program: Program) -> list[tuple[str, str]]:
    """The modules that the library keeps together, which no placement by hand may part."""
    log_of_run[0] = Log(plain=False)
    model, batch = program.start()
    inputs = tuple(tensor.clone() for tensor in batch.chunk(program.microbatches)[0].chunk(2, 1))
    trace = trace_forward(model, model, inputs)
    return [join.modules for join in (*structural_joins(ModelTree.of(model), traced=True), *trace.joins)]


def run_divided(program: Program, job: Job) -> tuple[Outcome, Counter[str]]:
    """Run divided over the ranks of a job; the outcome, and how many requests of each kind were sent."""
    log = log_of_run[0] = Log(plain=False)
    results = job.run(lambda runtime: run_on_rank(program, runtime), program.settings(), SECONDS)
    # The refusal of one rank reaches the others as a RemoteError.
    for result in sorted(results, key=lambda result: isinstance(result, smp.RemoteError)):
        if isinstance(result, BaseException):
            raise result
    left = [result for result in results if isinstance(result, Left)]
    if not job.rests:
        raise AssertionError("frames or requests are left")
    left[0].add_log(log)
    sent: Counter[str] = Counter()
    for one in left:
        sent.update(one.sent)
    return merged(left), sent


def run_on_rank(program: Program, runtime: Runtime) -> Left:
    """Run a program as one of the ranks."""
    module, whole_batch = program.start()  # anew on each: a copy of a scripted module has no parameters
    for path, rank in program.places.items():
        smp.set_partition(module.get_submodule(path), rank)
    model = smp.DistributedModel(module)
    for path, strategy in program.checkpointed.items():
        smp.set_activation_checkpointing(module.get_submodule(path), strategy=strategy)
    left, sent = Left({}, [], replica=smp.dp_rank()), Counter[str]()
    optimizer = smp.DistributedOptimizer(Updating(model.parameters())) if program.sharded else None
    weight = log_of_run[0].weight = WEIGHTS[program.replicas][left.replica]
    backward = model.backward if weight == 1 else weighed(model.backward, weight)

    def keep_gradients(when: str = "") -> None:
        for name, parameter in module.named_parameters():
            if not is_sentinel(parameter):
                is_share = optimizer is not None and runtime[ParameterShards].assigned(parameter) is not None
                gradient = None if parameter.grad is None else parameter.grad.clone()
                (left.shares if is_share else left.values)[f"gradient of {name}{when}"] = gradient

    @smp.step(non_split_inputs=["step"])
    def train(batch: torch.Tensor, numbers: torch.Tensor, step: int) -> torch.Tensor:
        return program.step(model, batch, f"step {step}, microbatch {int(numbers[0])}", backward)

    @smp.step(non_split_inputs=["after"])
    def evaluate(batch: torch.Tensor, numbers: torch.Tensor, after: str) -> torch.Tensor:
        return program.evaluate(model, batch, f"evaluation after {after}, microbatch {int(numbers[0])}")

    def note(outputs: list[torch.Tensor]) -> None:
        left.losses += outputs
        left.steps.add(runtime.step.number)
        sent.update(runtime.server.stats()["step"]["sent"])

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
    numbers = torch.arange(program.microbatches).repeat_interleave(program.rows)
    for step in range(program.steps):
        batch = whole_batch.roll(step, 0) if program.updates else whole_batch
        note(train(batch, numbers, step).outputs)
        if program.updates:
            keep_gradients(f" in step {step}")
            if optimizer is not None:
                optimizer.step()
            for parameter in () if optimizer is not None else model.local_parameters():
                if parameter.grad is not None:
                    update(parameter, parameter.grad, elementwise=False)
            model.zero_grad()
        for kind in program.evaluations_after(step):
            model.eval()
            with _MODES[kind]():
                note(evaluate(batch, numbers, f"{step} in {kind}").outputs)
            model.train()
    held = (*module.named_parameters(), *module.named_buffers())
    if not program.updates:
        keep_gradients()
    left.values |= {f"value of {name}": tensor.detach() for name, tensor in held if not is_sentinel(tensor)}
    left.values |= state_of(model.local_named_modules())
    left.sent = dict(sent)
    return left
