"""Random programs over nested modules, compared with plain torch: exact, or a clear error; never silently wrong.

``python -m tests.frames.programs --count 20000`` tries many; ``--show SEED`` prints one.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from shardwright.errors import FrameError, NotOwnedError, PartitionError, RemoteError, UnsupportedValueError
from torch import nn

from tests.frames.blocks import Block
from tests.frames.generator import Generator
from tests.frames.job import Job, in_process_ranks
from tests.frames.log import FEATURES
from tests.frames.program import Outcome, Program, difference, joins_of, run_divided, run_plain

#: Programs that once went wrong, one to a line.
FOUND = Path(__file__).with_name("found.jsonl")
#: The largest share of programs that may be refused. Most of those hang hooks on what another rank gave; since modules
#: that keep something are no longer joined with what runs between their uses, more is given by other ranks.
MOST_REFUSED = 0.1
#: The smallest share of programs in which each needed feature must occur.
LEAST_SHARE = 0.15
_REFUSALS = (FrameError, PartitionError, NotOwnedError, UnsupportedValueError)


@dataclasses.dataclass
class Trial:
    """What came of a program.

    Attributes:
        seed: Its seed.
        verdict: ``exact``, ``refused`` or ``wrong``.
        why: The refusal's text, or the difference.
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
        del self._jobs[ranks]

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


def draw_program(seed: int) -> tuple[Program, Outcome, frozenset[str]]:
    """The first program of a seed that plain torch can run and whose parts get a gradient, and what it gives there."""
    for attempt in range(1000):
        text = f"{seed}.{attempt}"
        generator = Generator(text)
        fields = generator.program()
        program = Program(seed=text, **fields)
        try:
            plain, log = run_plain(program)
        except (RuntimeError, IndexError, TypeError):
            continue
        if all(value is None for name, value in plain.values.items() if name.startswith("gradient of parts.")):
            continue
        program.places = generator.places(log.ran, joins_of(program), fields)
        if seed % 3 == 0:  # beside what the generator drew, so that the programs stay what they were
            program.pipeline = "zero_bubble"
        # What a run has shown to hooks cannot be taken back.
        program.static = seed % 2 == 1 and "tensor hooks" not in log.features
        # That a module's calls have to keep their order is known after one step.
        program.static_steps = int("buffers that change" in log.features)
        if log.depends_on_order and "tensor hooks" in log.features and program.microbatches > 1:
            program.active = 1
            if program.pipeline == "simple":
                program.pipeline = "interleaved"
        return program, plain, frozenset(log.features)
    raise AssertionError(f"seed {seed} gives no program that plain torch can run")


def try_program(program: Program, plain: Outcome, features: frozenset[str], on: Jobs) -> Trial:
    """Run a program divided, and compare."""
    job = on.of(program.ranks)
    verdict, why = "exact", ""
    try:
        found = difference(plain, run_divided(program, job))
        if found is not None:
            verdict, why = "wrong", found
    except _REFUSALS as error:
        verdict, why = "refused", f"{type(error).__name__}: {error}"
    except RemoteError as error:
        verdict = "refused" if error.kind in [kind.__name__ for kind in _REFUSALS] else "wrong"
        why = f"{error.kind}: {error.message}"
    except TimeoutError as error:
        on.drop(program.ranks)
        return Trial(program.seed, "wrong", f"hung: {error}", features, (False, False))
    except Exception as error:
        verdict, why = "wrong", f"{type(error).__name__}: {error}"
    sent = job.sent()
    return Trial(program.seed, verdict, why, features, (sent["forward"] > 0, sent["backward"] > 0))


def try_seeds(seeds: Iterable[int], on: Jobs) -> Iterator[Trial]:
    """Try the programs of some seeds."""
    for seed in seeds:
        yield try_program(*draw_program(seed), on)


def stored(line: str) -> Program:
    """A program from a line of :data:`FOUND`."""
    return Program(**json.loads(line))


@dataclasses.dataclass
class Summary:
    """What came of many programs."""

    trials: list[Trial]

    def share(self, feature: str) -> float:
        """The share of programs with a feature."""
        return sum(feature in trial.features for trial in self.trials) / len(self.trials)

    def of(self, verdict: str) -> list[Trial]:
        """Those with a verdict."""
        return [trial for trial in self.trials if trial.verdict == verdict]

    @property
    def crossed(self) -> tuple[float, float]:
        """The shares of programs in which requests, and gradients, crossed ranks."""
        forward, backward = zip(*(trial.crossed for trial in self.trials), strict=True)
        return sum(forward) / len(forward), sum(backward) / len(backward)

    @property
    def passes(self) -> bool:
        """Whether nothing is wrong and little is refused."""
        return not self.of("wrong") and len(self.of("refused")) < MOST_REFUSED * len(self.trials)

    def table(self) -> str:
        """Features and outcomes with their shares."""
        verdicts = ("exact", "refused", "wrong")
        lines = [f"{'feature':<26}{'share':>8}" + "".join(f"{verdict:>9}" for verdict in verdicts)]
        for feature in ("", *FEATURES):
            those = [trial for trial in self.trials if not feature or feature in trial.features]
            counts = [sum(trial.verdict == verdict for trial in those) for verdict in verdicts]
            lines.append(
                f"{feature or 'all programs':<26}{len(those) / len(self.trials):>8.1%}"
                + "".join(f"{count:>9}" for count in counts)
            )
        forward, backward = self.crossed
        lines.append(f"requests crossed ranks in {forward:.1%} of the programs, gradients in {backward:.1%}")
        refusals = collections.Counter(trial.why[-70:] for trial in self.of("refused"))
        lines += [f"{count:6} refused: ...{why}" for why, count in refusals.most_common()]
        lines += [f"seed {trial.seed} is wrong: {trial.why[:200]!r}" for trial in self.of("wrong")[:20]]
        return "\n".join(lines)

    def as_json(self) -> str:
        """The outcome on one line."""
        counts = {verdict: len(self.of(verdict)) for verdict in ("exact", "refused", "wrong")}
        seeds = [int(trial.seed.partition(".")[0]) for trial in self.of("wrong")]
        first, last = (int(self.trials[place].seed.partition(".")[0]) for place in (0, -1))
        return json.dumps({"programs": len(self.trials), "seeds": [first, last], **counts, "wrong_seeds": seeds})


def describe(program: Program) -> str:
    """The program as text."""
    fields = dataclasses.asdict(program)
    del fields["tree"]
    lines = [json.dumps(fields)]
    for name, module in program.start()[0].named_modules(remove_duplicate=False):
        if isinstance(module, Block):
            lines.append(f"{name or 'root'} returns {module.result}")
            lines += [f"    {operation}" for operation in module.operations]
        elif name and not isinstance(module, nn.ModuleList):
            lines.append(f"{name}: {type(module).__name__}")
    return "\n".join(lines)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Random divided programs against plain torch.")
    parser.add_argument("--count", type=int, default=1000, help="how many programs")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--show", type=int, help="print one program and its outcome")
    parser.add_argument("--store", type=int, help="print one program as a line to be kept")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with jobs() as on:
        if arguments.store is not None:
            print(json.dumps(dataclasses.asdict(draw_program(arguments.store)[0])))
            return 0
        if arguments.show is not None:
            program, plain, features = draw_program(arguments.show)
            print(describe(program))
            trial = try_program(program, plain, features, on)
            print(trial.verdict, trial.why, sep=": ")
            return 0
        summary = Summary([])
        for trial in try_seeds(range(arguments.start, arguments.start + arguments.count), on):
            summary.trials.append(trial)
            if trial.verdict == "wrong":
                print(f"seed {trial.seed} is wrong: {trial.why[:200]!r}", file=sys.stderr, flush=True)
    print(summary.table())
    print(summary.as_json())
    return 0 if summary.passes else 1


if __name__ == "__main__":
    sys.exit(main())
