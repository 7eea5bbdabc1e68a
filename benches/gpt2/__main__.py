"""Measures a GPT-2's training step on two ranks of one thread, beside one process, DDP and torch's pipelines."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Iterable, Mapping

from benches import beside
from benches.communication.figures import conclude
from benches.gpt2.figures import BARS, Measured, disagreements, figures, table
from benches.ranks import Ranks

#: Jobs of two processes each, with the configurations that they hold. Those whose memory counts are alone in theirs.
#: All configurations at once would not fit into 24 GiB, so what ours are compared with runs in every group.
GROUPS = (
    (
        ("single", "halves"),
        ("torch/1f1b/5-3",),
        # As few microbatches in flight as 1F1B has.
        ("ours/interleaved/auto/2",),
        ("ours/interleaved/auto/2/static",),
    ),
    (
        ("halves",),
        ("torch/1f1b/5-3",),
        ("torch/zero_bubble/5-3",),
        ("ours/zero_bubble/auto/4/static",),
    ),
    (
        ("ddp", "halves"),
        ("torch/1f1b/5-3",),
        ("torch/gpipe/5-3",),
        ("ours/simple/auto/8/static",),
    ),
)
ROUNDS = 5
#: Where another commit is measured too.
BESIDE_ROUNDS = 15
#: Steps before those: the first divides the model, the next is recorded for static mode, and two more are measured for
#: the choice of which backwards are split.
WARM_UP = 4
#: Whose losses are right.
REFERENCE = "single"
LIMIT_SECONDS = 180.0


#: What is measured of another commit, alone in its job. Placed by hand, as the automatic partition most often does: its
#: luck with measured times moves a step by more than what two commits differ by.
BESIDE = ("ours/interleaved/101010101/2", "ours/zero_bubble/101010101/4/static")


def compare(commit: str, at_most: float, rounds: int) -> int:
    """Print the figures of both commits, and how many times as long a step of this one takes."""
    sides: dict[str, dict[str, str]] = {"this": {}, commit: beside.variables_of(commit)}
    figures = {}
    print(f"{'seconds, medians':34}" + "".join(f"{side:>14}" for side in sides) + f"{'ratio':>10}")
    for name in BESIDE:
        with contextlib.ExitStack() as stack:
            benches = {side: Bench([(name,)], stack, variables) for side, variables in sides.items()}
            for number in range(WARM_UP + rounds):
                for side in list(sides)[:: 1 if number % 2 else -1]:
                    benches[side].round(number, counts=number >= WARM_UP)
            print(file=sys.stderr)
            ours, others = (benches[side].measured[name].seconds for side in sides)
        key = f"{name.split('/')[1]}_vs_beside"
        figures[key] = beside.ratio(ours, others)
        medians = "".join(f"{statistics.median(each):14.3f}" for each in (ours, others))
        print(f"{name:34}{medians}{figures[key]:10.3f}")
    return beside.conclude(figures, at_most)


class Bench:
    """One group: rounds over its configurations, one step of each in turn."""

    def __init__(
        self,
        jobs: Iterable[tuple[str, ...]],
        stack: contextlib.ExitStack,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start all jobs, which live as long as ``stack``, with these variables besides."""
        self.measured: dict[str, Measured] = {}
        self.refused: list[str] = []
        self._jobs: dict[str, Ranks] = {}
        self._alone: dict[str, Ranks] = {}
        for names in jobs:
            self._say(f"start {', '.join(names)}")
            job = stack.enter_context(Ranks("benches.gpt2.rank", ",".join(names), environment=environment))
            why, *_ = job.ask(limit=LIMIT_SECONDS, do="build")
            if why is not None:
                print(f"\n{', '.join(names)} is not measured: {why}", file=sys.stderr)
                self.refused += names
                job.close()
                continue
            for name in names:
                self._jobs[name] = job
                self.measured[name] = Measured()
            if len(names) == 1:
                self._alone[names[0]] = job

    def round(self, number: int, counts: bool) -> None:
        """One step of each, in an order that changes from round to round; the first ones do not count."""
        names = list(self._jobs)
        turn = number * 3 % len(names)
        for name in names[turn:] + names[:turn]:
            self._say(f"round {number + 1}: {name}")
            answers = [a for a in self._jobs[name].ask(limit=LIMIT_SECONDS, do="step", name=name) if not a["idle"]]
            if counts:
                seconds = max(a["ended"] for a in answers) - min(a["began"] for a in answers)
                self.measured[name].seconds.append(seconds)
            self.measured[name].losses.append(statistics.mean(a["loss"] for a in answers if a["loss"] is not None))

    def weigh(self) -> None:
        """Ask for peaks of memory."""
        for name, job in self._alone.items():
            self.measured[name].peak_bytes = job.ask(do="peak_bytes")

    def _say(self, what: str) -> None:
        print(f"\r{what:70}", end="", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-gpt2", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round that counts: whether it works, not how fast")
    beside.add_argument(parser)
    args = parser.parse_args()
    if args.beside:
        return compare(args.beside, args.at_most, 1 if args.quick else BESIDE_ROUNDS)
    measured: list[dict[str, Measured]] = []
    refused: list[str] = []
    for jobs in GROUPS:
        with contextlib.ExitStack() as stack:
            bench = Bench(jobs, stack)
            rounds = WARM_UP + (1 if args.quick else ROUNDS)
            for number in range(rounds):
                bench.round(number, counts=number >= WARM_UP)
            bench.weigh()
            print(file=sys.stderr)
        measured.append(bench.measured)
        refused += bench.refused
    print(table(measured, refused))
    losses = measured[0][REFERENCE].losses
    wrong = [sentence for group in measured for sentence in disagreements(group, losses)]
    print("\n".join(["", *wrong]))
    for name in refused:
        print(f"missed: {name} could not be measured: the library has no such schedule")
    missed = conclude(figures(measured), BARS)
    return 1 if missed or wrong or refused else 0


if __name__ == "__main__":
    sys.exit(main())
