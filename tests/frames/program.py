"""A program over nested modules as data, its runs in plain torch and divided over ranks, and their comparison."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import shardwright as smp
import torch
from shardwright.model.sentinel import is_sentinel
from shardwright.partition.audit import structural_joins
from shardwright.partition.trace import trace_forward
from shardwright.partition.tree import ModelTree
from shardwright.runtime import Runtime
from torch import nn

from tests.frames.blocks import WIDTH, Block
from tests.frames.generator import Spec
from tests.frames.job import Job
from tests.frames.log import Log, log_of_run

#: The largest error, relative to the largest element of the reference or a thousandth of the largest gradient.
ALLOWED = 1e-10
_ROWS = 2


@dataclasses.dataclass
class Program:
    """A program.

    Attributes:
        seed: The seed of its weights and inputs.
        tree: Its modules.
        ranks: The number of ranks.
        auto: Whether modules that are not placed by hand are placed by cost, not with their parents.
        memory_weight: The weight of memory in that.
        microbatches: The number of microbatches.
        pipeline: The schedule.
        active: The number of microbatches under way.
        steps: How often the step function is called.
        read: Which of the root's tensors the loss reads.
        roots: Whether backward starts from ``one`` loss or from ``several``, or is called (``calls``) for each.
        leaves: Whether the model is given leaves.
        places: Where modules are placed by hand, by path.
        static: Whether callers go on before results are there.
        static_steps: From which step on, counted from 0; in the first one from its second microbatch on.
    """

    seed: str
    tree: Spec
    ranks: int
    auto: bool
    memory_weight: float
    microbatches: int
    pipeline: str
    active: int
    steps: int
    read: list[int]
    roots: str
    leaves: bool
    places: dict[str, int] = dataclasses.field(default_factory=dict)
    static: bool = False
    static_steps: int = 0

    def start(self) -> tuple[nn.Module, torch.Tensor]:
        """The model with its weights, and a batch: two inputs for each microbatch, one beside the other."""
        torch.manual_seed(int(self.seed.partition(".")[0]))
        model = build(self.tree, {}).double()
        shape = (_ROWS * self.microbatches, WIDTH)
        return model, torch.cat([torch.randn(*shape, dtype=torch.float64) for _ in range(2)], 1)

    def settings(self) -> dict[str, Any]:
        """The configuration keys."""
        return {
            "microbatches": self.microbatches,
            "pipeline": self.pipeline,
            "active_microbatches": self.microbatches if self.pipeline == "simple" else self.active,
            "auto_partition": self.auto,
            "default_partition": 0,
            "memory_weight": self.memory_weight,
            "static_mode": self.static,
            "fast_mode": self.static,
        }

    def step(self, model: Any, batch: torch.Tensor, index: str, backward: Any) -> torch.Tensor:
        """The step function, of one microbatch: run, read the loss, backward."""
        log = log_of_run[0]
        inputs = [tensor.clone() for tensor in batch.chunk(2, 1)]
        inputs[0].requires_grad_()
        tensors = model(*(inputs if self.leaves else [tensor * 1 for tensor in inputs]))
        chosen = [tensors[place % len(tensors)] for place in self.read]
        terms = [((number + 1) * tensor).sum() for number, tensor in enumerate(chosen)]
        loss = sum(terms[1:], start=terms[0])
        log.finals[index] = [tensor.detach().clone() for tensor in tensors]
        roots = [loss] if self.roots == "one" else [term for term in terms if term.requires_grad]
        if self.roots == "several" and len(roots) > 1:
            log.saw("several backward roots")
            backward(roots, [torch.full((), 0.5 + number, dtype=torch.float64) for number in range(len(roots))])
        elif self.roots == "calls" and len(roots) > 1:
            log.saw("several backward roots")
            for root in roots:
                backward(root)
        elif roots and roots[0].requires_grad:
            backward(roots[0])
        log.finals[index] += [tensor.grad for tensor in inputs]
        return loss.detach()


def build(spec: Spec, made: dict[int, nn.Module]) -> nn.Module:
    """The module of a spec; ``made`` gathers blocks by key."""
    if "again" in spec:
        return made[spec["again"]]
    if "layer" in spec:
        return _layer(spec)
    children = [build(part, made) for part in spec["parts"]]
    block = made[spec["key"]] = Block(spec["operations"], spec["result"], children)
    if "tied" in spec:
        block.weight = made[spec["tied"]].weight
    return block


def _layer(spec: Spec) -> nn.Module:
    if spec["layer"] == "normalisation":
        return nn.BatchNorm1d(WIDTH)
    if spec["layer"] == "linear":
        return nn.Linear(WIDTH, WIDTH)
    if spec["layer"] == "recurrent":
        return nn.GRU(WIDTH, WIDTH, batch_first=True)
    activation = nn.Tanh()
    layers: list[nn.Module] = []
    for active in spec["activations"]:
        layers += [nn.Linear(WIDTH, WIDTH)] + [activation] * active
    return nn.Sequential(*layers)


@dataclasses.dataclass
class Outcome:
    """What a run left behind, by name."""

    values: dict[str, Any]


def _outcome(gradients: dict[str, Any], held: dict[str, Any], losses: list[torch.Tensor], log: Log) -> Outcome:
    values: dict[str, Any] = {f"gradient of {name}": gradient for name, gradient in gradients.items()}
    values |= {f"value of {name}": tensor for name, tensor in held.items()}
    values |= {f"loss {index}": loss for index, loss in enumerate(losses)}
    for name, tensors in log.finals.items():
        values |= {f"{name}, tensor {index}": tensor for index, tensor in enumerate(tensors)}
    for name, seen in log.hooks.items():
        # The order of independent ones is the engine's affair, that of microbatches the schedule's.
        seen.sort(key=_sorting)
        values |= {f"{name}, firing {index}": gradient for index, gradient in enumerate(seen)}
    for name, kept in log.retained.items():
        kept_gradients = sorted((tensor.grad for tensor in kept), key=_sorting)
        values |= {f"{name}, number {index}": gradient for index, gradient in enumerate(kept_gradients)}
    return Outcome(values)


def _sorting(gradient: torch.Tensor | None) -> tuple[bool, tuple[int, ...], list[float]]:
    if gradient is None:
        return True, (), []
    return False, tuple(gradient.shape), [round(float(value), 6) for value in gradient.flatten()]


def run_plain(program: Program) -> tuple[Outcome, Log]:
    """Run in plain torch, microbatch after microbatch."""
    log = log_of_run[0] = Log(plain=True)
    (model, batch), losses = program.start(), []
    parameters = dict(model.named_parameters())
    for step in range(program.steps):
        before = {name: parameter.grad for name, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = None
        for number, part in enumerate(batch.chunk(program.microbatches)):
            index = f"step {step}, microbatch {number}"
            losses.append(program.step(model, part, index, torch.autograd.backward))
            log.end_microbatch()
        for name, parameter in parameters.items():
            gradient = None if parameter.grad is None else parameter.grad / program.microbatches
            earlier = before[name]
            parameter.grad = gradient if earlier is None else earlier if gradient is None else earlier + gradient
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    values = {name: tensor.detach() for name, tensor in (*parameters.items(), *model.named_buffers())}
    log.ran = [name for name, module in model.named_modules() if module in log.modules]
    return _outcome(gradients, values, losses, log), log


def joins_of(program: Program) -> list[tuple[str, str]]:
    """The modules that the library keeps together, which no placement by hand may part."""
    log_of_run[0] = Log(plain=False)
    model, batch = program.start()
    inputs = tuple(tensor.clone() for tensor in batch.chunk(program.microbatches)[0].chunk(2, 1))
    trace = trace_forward(model, model, inputs)
    return [join.modules for join in (*structural_joins(ModelTree.of(model), traced=True), *trace.joins)]


def run_divided(program: Program, job: Job) -> Outcome:
    """Run divided over the ranks of a job."""
    log = log_of_run[0] = Log(plain=False)
    original, whole_batch = program.start()

    def main(runtime: Runtime) -> tuple[dict[str, Any], dict[str, Any], list[torch.Tensor]]:
        module = copy.deepcopy(original)
        for path, rank in program.places.items():
            smp.set_partition(module.get_submodule(path), rank)
        model = smp.DistributedModel(module)

        @smp.step(non_split_inputs=["step"])
        def train(batch: torch.Tensor, numbers: torch.Tensor, step: int) -> torch.Tensor:
            return program.step(model, batch, f"step {step}, microbatch {int(numbers[0])}", model.backward)

        losses: list[torch.Tensor] = []
        if program.static:
            runtime.sites._static_steps = program.static_steps
        for step in range(program.steps):
            numbers = torch.arange(program.microbatches).repeat_interleave(_ROWS)
            losses += train(whole_batch, numbers, step).outputs
        gradients = {name: p.grad for name, p in module.named_parameters() if not is_sentinel(p)}
        held = (*module.named_parameters(), *module.named_buffers())
        values = {name: tensor.detach() for name, tensor in held if not is_sentinel(tensor)}
        return gradients, values, losses

    gradients: dict[str, Any] = {}
    values: dict[str, Any] = {}
    results = []
    for rank, result in enumerate(job.run(main, program.settings())):
        if isinstance(result, BaseException):
            raise result
        if gradients.keys() & result[0].keys():
            raise AssertionError(f"rank {rank} holds {gradients.keys() & result[0].keys()} too")
        gradients |= result[0]
        values |= result[1]
        results.append(result[2])
    if not job.rests:
        raise AssertionError("frames or requests are left")
    return _outcome(gradients, values, results[-1], log)


def difference(plain: Outcome, divided: Outcome) -> str | None:
    """The first difference, None when there is none; measured as in docs/design/parity.md."""
    gradients = [v for name, v in plain.values.items() if name.startswith("gradient") and v is not None and v.numel()]
    floor = max((float(gradient.abs().max()) for gradient in gradients), default=0.0) / 1000
    for name in dict.fromkeys([*plain.values, *divided.values]):
        expected, found = plain.values.get(name), divided.values.get(name)
        if expected is None and found is None:
            continue
        scale = floor if name.startswith("gradient") else 0.0
        if expected is None or found is None or not _agree(expected, found, scale):
            return f"{name}: {expected} in plain torch, {found} divided"
    return None


def _agree(expected: torch.Tensor, found: torch.Tensor, floor: float) -> bool:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()) or not torch.equal(
        expected[~finite].nan_to_num(), found[~finite].nan_to_num()
    ):
        return False
    expected, found = expected[finite], found[finite]
    if not expected.numel():
        return True
    return float((expected - found).abs().max()) <= ALLOWED * max(float(expected.abs().max()), floor)
