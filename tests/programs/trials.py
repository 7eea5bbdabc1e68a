"""Draws programs, runs them in plain torch and divided, and compares: exact, or a clear error; never silently wrong."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from shardwright.errors import (
    FrameError,
    NotOwnedError,
    PartitionError,
    RemoteError,
    StallError,
    UnsupportedValueError,
)
from torch import nn

from tests.frames.job import Job, in_process_ranks
from tests.programs.blocks import Block
from tests.programs.generator import Generator
from tests.programs.layers import Transformed
from tests.programs.outcome import Outcome, difference
from tests.programs.processes import run_in_processes
from tests.programs.program import Program
from tests.programs.running import joins_of, run_divided, run_plain
from tests.programs.script import draw_script, features_of
from tests.programs.tables import TRANSFORMS
from tests.programs.wide import WideGenerator

#: Programs that once went wrong, one to a line.
FOUND = Path(__file__).with_name("found.jsonl")
_REFUSALS = (FrameError, PartitionError, NotOwnedError, UnsupportedValueError)
_REFUSED = [kind.__name__ for kind in _REFUSALS]
#: What plain torch says of programs that it cannot run.
_PLAIN_ERRORS = (RuntimeError, IndexError, TypeError, ValueError)
#: No wide program computes with larger numbers, which would lose all digits in one subtraction.
_MAX = 1e6
#: How many programs have checkpointed modules.
_CHECKPOINTED = 0.3
#: In how many of them these may be modules that use transforms of functions.
_TRANSFORMS_CHECKPOINTED = 0.2
#: How many of those in real processes have replicas, and in how many of these their optimizer's state is sharded.
_REPLICATED, _SHARDED = 0.6, 0.5
#: Verdicts in the order of the table.
VERDICTS = ("exact", "refused", "wrong", "hung", "crashed")


@dataclasses.dataclass
class Trial:
    """What came of a program.

    Attributes:
        seed: Its seed.
        verdict: One of :data:`VERDICTS`.
        why: The refusal's or the error's text, or the difference.
        features: What the program made use of in plain torch.
        crossed: Whether requests went to other ranks, and whether gradients came back from them.
    """

    seed: str
    verdict: str
    why: str
    features: frozenset[str]
    crossed: tuple[bool, bool]


class Jobs:
    """One job for each number of ranks, used by one program after another."""

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}

    def of(self, ranks: int) -> Job:
        if ranks not in self._jobs:
            self._jobs[ranks] = Job(ranks)
        return self._jobs[ranks]

    def drop(self, ranks: int) -> None:
        """Never use a job again that may hang."""
        self._jobs.pop(ranks, None)

    def close(self) -> None:
        for job in self._jobs.values():
            job.close()


@contextmanager
def jobs() -> Iterator[Jobs]:
    """Jobs to try programs on."""
    made = Jobs()
    with in_process_ranks(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("shardwright").setLevel(logging.ERROR)
        try:
            yield made
        finally:
            logging.getLogger("shardwright").setLevel(logging.NOTSET)
            made.close()


def draw_program(seed: int, wide: bool = False, processes: float = 0.0) -> tuple[Program, Outcome, frozenset[str]]:
    """The first program of a seed that plain torch can run and whose parts get a gradient, and what it gives there."""
    for attempt in range(1000):
        text = f"{seed}.{attempt}"
        generator = WideGenerator(text, processes) if wide else Generator(text)
        fields = generator.program()
        program = Program(seed=text, **fields)
        if program.processes:
            draw = random.Random(f"{text} replicated")
            program.replicas = 2 if draw.random() < _REPLICATED else 1
            program.sharded = program.replicas > 1 and draw.random() < _SHARDED
        try:
            if wide:
                draw_script(program)
            plain, log = run_plain(program)
            if program.evaluations and any("cripted" in feature for feature in log.features):
                # What TorchScript optimises in inference mode fails later, or not: as the process has used it before.
                program.evaluations = [(step, "no_grad") for step, _ in program.evaluations]
                plain, log = run_plain(program)
        except _PLAIN_ERRORS:
            continue
        if wide and not _is_tame(plain):
            continue
        gradients = [value for name, value in plain.values.items() if name.startswith("gradient of parts.")]
        if all(value is None for value in gradients):
            continue
        program.places = generator.places(log.ran, joins_of(program), fields)
        program.checkpointed = _checkpointed(program, log.ran)
        for has, feature in (
            (bool(program.checkpointed), "activation checkpointing"),
            (program.processes, "real processes"),
            (program.updates, "updates between steps"),
            (program.replicas > 1, "replicas"),
            (program.sharded, "sharded optimizer state"),
        ):
            if has:
                log.saw(feature)
        for feature in features_of(program):
            log.saw(feature)
        if wide:
            return program, plain, frozenset(log.features)
        if seed % 3 == 0:  # beside what the generator drew, so that the programs stay what they were
            program.pipeline = "zero_bubble"
        program.static = seed % 2 == 1
        # That a module's calls have to keep their order is known after one step.
        program.static_steps = int("buffers that change" in log.features)
        return program, plain, frozenset(log.features)
    raise AssertionError(f"seed {seed} gives no program that plain torch can run")


def _checkpointed(program: Program, ran: list[str]) -> dict[str, str]:
    """Draw the modules that are checkpointed; beside what the generator drew, so that programs stay what they were."""
    draw = random.Random(f"{program.seed} checkpointed")
    if draw.random() >= _CHECKPOINTED:
        return {}
    parts = dict(program.start()[0].named_modules())
    fit = [
        path
        for path, module in parts.items()
        if (path in ran or isinstance(module, nn.Sequential))
        and not any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())
    ]
    if draw.random() >= _TRANSFORMS_CHECKPOINTED:  # which PyTorch cannot compute again, so that they are refused
        fit = [path for path in fit if not any(map(_transforms, parts[path].modules()))]
    strategies = ("each", "contiguous", "group_2")
    return {
        path: draw.choice(strategies) if isinstance(parts[path], nn.Sequential) else "each"
        for path in draw.sample(fit, min(len(fit), draw.choice((1, 1, 2, 3))))
    }


def _transforms(module: nn.Module) -> bool:
    """Whether a module's own forward uses transforms of functions."""

    def used(operations: Any) -> bool:
        if not isinstance(operations, list | tuple):
            return False
        return (operations[:1] == ["use"] and operations[1] in TRANSFORMS) or any(map(used, operations))

    return isinstance(module, Transformed) or used(getattr(module, "operations", ()))


def _is_tame(plain: Outcome) -> bool:
    tensors = [value for value in plain.values.values() if hasattr(value, "isfinite") and value.is_floating_point()]
    return all(float(tensor.abs().max()) < _MAX for tensor in tensors if tensor.numel())


def try_program(program: Program, plain: Outcome, features: frozenset[str], on: Jobs) -> Trial:
    """Run a program divided, and compare."""
    verdict, why, sent = "exact", "", Counter[str]()
    if program.layout:  # ranks have parts of gradients, which are compared by what becomes of weights
        plain = Outcome({name: one for name, one in plain.values.items() if not name.startswith("gradient of ")})
    try:
        if program.processes:
            outcomes, sent = run_in_processes(program)
        else:
            divided, sent = run_divided(program, on.of(program.ranks))
            outcomes = [divided]
        for divided in outcomes:
            found = difference(plain, divided)
            if found is not None:  # and not where plain torch itself gives so different values for so equal inputs
                found = difference(plain, divided, [run_plain(program, number)[0] for number in range(3)])
            if found is not None:
                verdict, why = "wrong", found
    except _REFUSALS as error:
        verdict, why = "refused", f"{type(error).__name__}: {error}"
    except (TimeoutError, StallError) as error:
        on.drop(program.ranks)
        verdict, why = "hung", f"{type(error).__name__}: {error}"
    except RemoteError as error:
        verdict = "refused" if error.kind in _REFUSED else "hung" if error.kind == "StallError" else "crashed"
        why = f"{error.kind}: {error.message}"
    except AssertionError as error:
        verdict, why = "wrong", f"{error}"
    except Exception as error:
        verdict, why = "crashed", f"{type(error).__name__}: {error}"
    return Trial(program.seed, verdict, why, features, (sent["forward"] > 0, sent["backward"] > 0))


def try_seeds(seeds: Iterable[int], on: Jobs, wide: bool = False, processes: float = 0.0) -> Iterator[Trial]:
    """Try the programs of some seeds."""
    for seed in seeds:
        yield try_program(*draw_program(seed, wide, processes), on)


def stored(line: str) -> Program:
    """A program from a line of :data:`FOUND`."""
    return Program(**json.loads(line))


def describe(program: Program) -> str:
    """The program as text."""
    fields = dataclasses.asdict(program)
    del fields["tree"]
    lines = [json.dumps(fields)]
    for name, module in program.start()[0].named_modules(remove_duplicate=False):
        if isinstance(module, Block):
            lines.append(f"{name or 'root'}, of width {module.width}, returns {module.result}")
            lines += [f"    {operation}" for operation in module.operations]
        elif name and not isinstance(module, nn.ModuleList):
            lines.append(f"{name}: {type(module).__name__}")
    return "\n".join(lines)
