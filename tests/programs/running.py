"""Runs a program in plain torch, over ranks that are threads, and as a rank of its own."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import shardwright as smp
from shardwright.job.runtime import Runtime
from shardwright.partition.structure import structural_joins
from shardwright.partition.trace import trace_forward
from shardwright.partition.tree import ModelTree
from torch import nn

from tests.frames.job import Job
from tests.programs.blocks import Block
from tests.programs.divided import Divided
from tests.programs.log import Log, log_of_run
from tests.programs.outcome import Left, Outcome, merged
from tests.programs.plain import Plain
from tests.programs.program import Program
from tests.programs.script import play
from tests.state.keepers import Keeper, plain

#: Longer than any program takes, also on a machine that has much else to do.
SECONDS = 150.0
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
    """Run in plain torch, job after job; with the number of a rounding on inputs that differ by it."""
    log = log_of_run[0] = Log(plain=True)
    left = Left({}, [], steps={0})
    saved: Any = None
    ran: dict[str, None] = {}
    for leg in range(len(program.legs())):
        side = Plain(program, log, left, rounding)
        if leg:
            side.resume(saved)
        play(program, side, leg)
        saved = side.save() if program.resumes else None
        ran |= {name: None for name, module in side.model.named_modules() if module in log.modules}
    side.finish()
    left.values |= state_of(side.model.named_modules())
    log.ran = [name for name, _ in side.model.named_modules() if name in ran]
    left.add_log(log)
    return merged([left]), log


def joins_of(program: Program) -> list[tuple[str, str]]:
    """The modules that the library keeps together, which no placement by hand may part."""
    log_of_run[0] = Log(plain=False)
    model, batch = program.start()
    _, given = program.arguments(batch.chunk(program.microbatches)[0])
    trace = trace_forward(model, model, given)
    return [join.modules for join in (*structural_joins(ModelTree.of(model), traced=True), *trace.joins)]


def run_divided(program: Program, job: Job) -> tuple[Outcome, Counter[str]]:
    """Run divided over the ranks of a job; the outcome, and how many requests of each kind were sent."""
    log = log_of_run[0] = Log(plain=False)
    left: list[Left] = []
    with tempfile.TemporaryDirectory(prefix="shardwright-program-") as folder:
        for leg in range(len(program.legs())):
            run = functools.partial(run_on_rank, program, folder=Path(folder), leg=leg)
            results = job.run(run, program.settings(), SECONDS)
            # The refusal of one rank reaches the others as a RemoteError.
            for result in sorted(results, key=lambda result: isinstance(result, smp.RemoteError)):
                if isinstance(result, BaseException):
                    raise result
            new = [result for result in results if isinstance(result, Left)]
            for earlier, later in zip(left, new, strict=bool(leg)):
                earlier.extend(later)
            left = left or new
            if not job.rests:
                raise AssertionError("frames or requests are left")
    left[0].add_log(log)
    sent: Counter[str] = Counter()
    for one in left:
        sent.update(one.sent)
    return merged(left), sent


def run_on_rank(program: Program, runtime: Runtime, *, folder: Path, leg: int) -> Left:
    """Run one of a program's jobs as one of the ranks, with a folder for what it saves."""
    side = Divided(program, runtime, folder)
    if leg:
        side.resume(leg)
    play(program, side, leg)
    if leg + 1 < len(program.legs()):
        side.save(leg + 1)
    else:
        side.finish()
        side.left.values |= state_of(side.model.local_named_modules())
    return side.left
