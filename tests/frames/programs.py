"""Random programs over nested modules, compared with plain torch: exact, or a clear error; never silently wrong.

``python -m tests.frames.programs --count 20000`` tries many; ``--show SEED`` prints one.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import json
import random
import sys
from typing import Any

import torch
from shardwright.errors import FrameError
from torch import nn

from tests.frames.blocks import UNARY, VIEW, WIDTH, WRITE, Block, Log, Operation, log_of_run
from tests.frames.loopback import LoopbackJob, guarded

IMPURE = ("write", "store", "load", "count", "buffer", "hook", "retain")


class Generator:
    """Draws programs; what may occur in one is drawn first, so that rare things meet in small programs too."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names = 0
        weights = {"weigh": 4, "unary": 3, "view": 3, "sum": 3, "write": 3, "call": 6, "split": 1}
        rare = ("mode", "branch", "hook", "retain", "count", "buffer", "store", "load", "weight")
        self.kinds = dict(weights)
        for kind in rare:
            if self.random.random() < 0.3:
                self.kinds[kind] = self.random.choice((1, 2))
        if "store" in self.kinds or "load" in self.kinds:
            self.kinds["store"] = self.kinds["load"] = 2
        if self.random.random() < 0.3:
            del self.kinds["write"]
        self.checkpoints = self.random.random() < 0.1
        if self.checkpoints:  # what is computed twice must do the same both times, in plain torch too
            self.kinds = {kind: weight for kind, weight in self.kinds.items() if kind not in IMPURE}

    def place(self) -> int:
        # Recent tensors more often than old ones.
        return self.random.choice((-1, -1, -2, -3, 0, 1, self.random.randrange(12)))

    def operation(self, num_children: int, depth: int = 0) -> Operation:
        draw, place = self.random, self.place
        kinds = {k: w for k, w in self.kinds.items() if (num_children or k != "call") and (depth < 2 or k != "mode")}
        kind = draw.choices(list(kinds), list(kinds.values()))[0]
        self.names += 1
        if kind == "unary":
            return kind, draw.choice(list(UNARY)), place()
        if kind == "view":
            return kind, draw.choice(list(VIEW)), place()
        if kind == "sum":
            return kind, place(), place(), draw.random() < 0.4
        if kind == "write":
            return kind, draw.choice(list(WRITE)), place(), place()
        if kind == "mode":
            return kind, draw.random() < 0.3, self.operations(num_children, draw.randint(1, 3), depth + 1)
        if kind == "branch":
            return kind, place(), *(self.operations(num_children, draw.randint(0, 2), depth + 1) for _ in range(2))
        if kind == "hook":
            return kind, f"hook{self.names}", place(), draw.random() < 0.5
        if kind == "retain":
            return kind, f"retained{self.names}", place()
        if kind in ("buffer", "load", "weight"):
            return (kind,)
        if kind == "call":
            styles = ["plain", "plain", "plain", "keyword", "list", "dict", "reach"]
            if self.checkpoints:
                styles += ["checkpoint", "checkpoint"]
            places = tuple(place() for _ in range(draw.choice((1, 1, 2, 3))))
            return kind, draw.randrange(num_children), places, draw.choice(styles), draw.choice((1, 1, 1, 2))
        return kind, place()

    def operations(self, num_children: int, count: int, depth: int = 0) -> list[Operation]:
        return [self.operation(num_children, depth) for _ in range(count)]

    def module(self, depth: int) -> nn.Module:
        draw = self.random
        if depth and draw.random() < 0.12:
            activation = nn.Tanh()
            layers: list[nn.Module] = []
            for _ in range(draw.randint(1, 4)):
                layers += [nn.Linear(WIDTH, WIDTH)] + [activation] * draw.randint(0, 1)
            return nn.Sequential(*layers)
        children = [self.module(depth + 1) for _ in range(draw.randint(1, 3) if depth == 0 else draw.randint(0, 2))]
        if depth >= 2:
            children = []
        operations = self.operations(len(children), draw.randint(1, 6))
        if depth == 0 and not any(kind == "call" for kind, *_ in operations):
            operations.append(("call", 0, (0, 1), "plain", 1))
        result = (
            ("all", ())
            if depth == 0
            else (
                draw.choice(("one", "one", "tuple", "dict", "list")),
                tuple(self.place() for _ in range(draw.choice((1, 2, 2, 3)))),
            )
        )
        return Block(operations, result, children)


@dataclasses.dataclass
class Program:
    """A program: the model, who owns what, its inputs, and which of its tensors the loss reads."""

    model: nn.Module
    owners: dict[str, int]
    inputs: list[torch.Tensor]
    read: list[int]
    guard_leaf: bool

    def step(self, model: nn.Module, inputs: list[torch.Tensor], backward: Any) -> list[torch.Tensor]:
        """The step function: run, read the loss, backward; returns all the root's tensors as they are then."""
        given = inputs if self.guard_leaf else [tensor * 1 for tensor in inputs]
        tensors = model(*given)
        chosen = [tensors[place % len(tensors)] for place in self.read]
        loss = sum(((index + 1) * tensor).sum() for index, tensor in enumerate(chosen))
        finals = [tensor.detach().clone() for tensor in tensors]
        assert isinstance(loss, torch.Tensor)
        if loss.requires_grad:
            backward(loss)
        return finals


def draw_program(seed: int) -> Program:
    """The program of a seed."""
    torch.manual_seed(seed)
    generator = Generator(seed)
    model = generator.module(0).double()
    names = [name for name, _ in model.named_modules()]
    ranks = generator.random.choice((2, 3))
    owners: dict[str, int] = {}
    for name in names:
        parent = owners[name.rpartition(".")[0]] if name else 0
        away = bool(name) and not name.endswith("parts") and generator.random.random() < 0.7
        owners[name] = generator.random.randrange(ranks) if away else parent
    inputs = [torch.randn(2, WIDTH, dtype=torch.float64), torch.randn(2, WIDTH, dtype=torch.float64)]
    inputs[0].requires_grad_()
    read = [generator.random.choice((-1, -2, -3, 0, generator.random.randrange(12))) for _ in range(3)]
    return Program(model, owners, inputs, read, generator.random.random() < 0.5)


@dataclasses.dataclass
class Outcome:
    """What a run left behind, by name."""

    values: dict[str, Any]


def _collect(
    model: nn.Module, buffers: dict[str, torch.Tensor], inputs: list[torch.Tensor], log: Log, finals: Any
) -> Outcome:
    values: dict[str, Any] = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    values |= {f"value of {name}": p.detach() for name, p in model.named_parameters()}
    values |= {f"buffer {name}": buffer for name, buffer in buffers.items()}
    values |= {f"gradient of input {index}": tensor.grad for index, tensor in enumerate(inputs)}
    values |= {f"tensor {index}": tensor for index, tensor in enumerate(finals)}
    for name, seen in log.hooks.items():
        seen.sort(key=lambda gradient: float(gradient.sum()))  # the order of independent ones is the engine's affair
        values |= {f"{name}, firing {index}": gradient for index, gradient in enumerate(seen)}
    values |= {f"{name}, number {index}": tensor.grad for index, (name, tensor) in enumerate(log.retained)}
    return Outcome(values)


def run_plain(program: Program) -> Outcome:
    """Run in plain torch."""
    log = log_of_run[0] = Log()
    model = copy.deepcopy(program.model)
    inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in program.inputs]
    finals = program.step(model, inputs, torch.autograd.backward)
    return _collect(model, dict(model.named_buffers()), inputs, log, finals)


def run_divided(program: Program) -> Outcome:
    """Run divided over simulated ranks."""
    log = log_of_run[0] = Log(checkpointing=True)
    model = copy.deepcopy(program.model)
    inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in program.inputs]
    job = LoopbackJob(model, program.owners.__getitem__)
    with guarded():
        finals = job.run(lambda backward: program.step(model, inputs, backward))
    if job.live_frames:
        raise AssertionError(f"{job.live_frames} frames are left")
    return _collect(model, job.owned_buffers(), inputs, log, finals)


def difference(plain: Outcome, divided: Outcome) -> str | None:
    """The first difference, None when there is none."""
    for name in [*plain.values, *(name for name in divided.values if name not in plain.values)]:
        expected, found = plain.values.get(name), divided.values.get(name)
        if (expected is None) != (found is None):
            # A zero gradient and none are the same sum.
            if name.startswith("gradient") and not (expected if found is None else found).any():
                continue
            return f"{name}: {expected} in plain torch, {found} divided"
        if expected is not None and (
            expected.shape != found.shape or not torch.allclose(expected, found, rtol=1e-9, atol=1e-11, equal_nan=True)
        ):
            return f"{name}: {expected} in plain torch, {found} divided"
    return None


def try_program(seed: int) -> tuple[str, str]:
    """Run a program both ways: ``exact``, ``refused``, ``plain failed``, or ``WRONG``, and why."""
    program = draw_program(seed)
    try:
        plain = run_plain(program)
    except (RuntimeError, IndexError, TypeError) as error:
        return "plain failed", str(error)
    try:
        divided = run_divided(program)
    except FrameError as error:
        return "refused", str(error)
    except Exception as error:
        return "WRONG", f"{type(error).__name__}: {error}"
    why = difference(plain, divided)
    return ("exact", "") if why is None else ("WRONG", why)


def describe(program: Program) -> str:
    """The program as text."""
    lines = [f"read {program.read}, inputs {'themselves' if program.guard_leaf else 'times 1'}"]
    for name, module in program.model.named_modules():
        if isinstance(module, Block):
            lines.append(f"{name or 'root'} on rank {program.owners[name]} returns {module.result}")
            lines += [f"    {operation}" for operation in module.operations]
        elif name and not isinstance(module, nn.ModuleList):
            lines.append(f"{name} on rank {program.owners[name]}: {type(module).__name__}")
    return "\n".join(lines)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Random divided programs against plain torch.")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--show", type=int, help="print one program and its outcome")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.show is not None:
        print(describe(draw_program(arguments.show)))
        print(*try_program(arguments.show), sep=": ")
        return 0
    outcomes: collections.Counter[str] = collections.Counter()
    refusals: collections.Counter[str] = collections.Counter()
    wrong = []
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        outcome, why = try_program(seed)
        outcomes[outcome] += 1
        if outcome == "refused":
            refusals[why[-60:]] += 1
        if outcome == "WRONG":
            wrong.append(seed)
            print(f"seed {seed}: {why[:160]!r}", file=sys.stderr)
    for why, count in refusals.most_common():
        print(f"{count:6} refused: ...{why}", file=sys.stderr)
    print(json.dumps({**outcomes, "wrong_seeds": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
