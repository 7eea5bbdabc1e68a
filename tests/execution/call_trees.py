"""Random modules that call one another over ranks, in static and fast mode: exact, and without a step that hangs.

``python -m tests.execution.call_trees --count 600`` tries many.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import random
import sys

import shardwright as smp
import torch
from shardwright.errors import StallError
from shardwright.job.runtime import Runtime
from shardwright.model.sentinel import is_sentinel
from torch import nn

from tests.frames.job import Job, in_process_ranks


@dataclasses.dataclass(frozen=True)
class Use:
    """How a module calls another.

    Attributes:
        module: Which one.
        gives_last: Whether it gives it what its last call returned; else what it was given itself.
        looks: Whether it computes with the result at once, so that it waits for its values.
    """

    module: nn.Module
    gives_last: bool = True
    looks: bool = False


class Caller(nn.Module):
    """A module that calls others one after another; its result is of the last one's and of its weight."""

    def __init__(self, width: int, uses: list[Use], computes_first: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width, width) / width)
        self.called = nn.ModuleList([use.module for use in uses])
        self.uses = [(use.gives_last, use.looks) for use in uses]
        self.computes_first = computes_first

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        last = (given @ self.weight).sigmoid() if self.computes_first else given
        for module, (gives_last, looks) in zip(self.called, self.uses, strict=True):
            last = module(last if gives_last else given)
            if looks:
                last = last * 2
        return last if self.computes_first and self.uses else (last @ self.weight).sigmoid()


@dataclasses.dataclass
class Tree:
    """Modules with their places.

    Attributes:
        model: The module at the top, which is on rank 0.
        places: Where the others are, by name.
        ranks: How many ranks there are.
        batch: What a step is given.
        settings: Further configuration keys.
        steps: How many steps are run.
    """

    model: nn.Module
    places: dict[str, int]
    ranks: int
    batch: torch.Tensor
    settings: dict[str, int | str]
    steps: int = 3


def draw(seed: int) -> Tree:
    """The tree of a seed: up to nine modules, some of them called several times, on two or three ranks."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    rows, width = chance.choice([(2, 4), (2, 8), (40, 160)])
    made: list[nn.Module] = []

    def module(depth: int) -> nn.Module:
        uses = []
        most = 0 if depth == 4 or len(made) > 5 else chance.choice([0, 1, 2, 3]) if depth else 3
        for _ in range(most):
            again = made and chance.random() < 0.25
            called = chance.choice(made) if again else module(depth + 1)
            uses.append(Use(called, chance.random() < 0.75, chance.random() < 0.15))
        made.append(Caller(width, uses, chance.random() < 0.3))
        return made[-1]

    model = module(0).double()
    ranks = chance.choice([2, 3])
    names = [name for name, part in model.named_modules() if name and isinstance(part, Caller)]
    microbatches = chance.choice([1, 1, 2, 4])
    settings: dict[str, int | str] = {
        "microbatches": microbatches,
        "pipeline": chance.choice(["interleaved", "interleaved", "simple", "looped", "zero_bubble"]),
    }
    batch = torch.rand(rows * microbatches, width, dtype=torch.float64)
    return Tree(model, {name: chance.randrange(ranks) for name in names}, ranks, batch, settings)


def difference(job: Job, tree: Tree) -> str | None:
    """Train in plain torch and over the ranks; the first gradient that differs, None when there is none."""
    plain, expected = copy.deepcopy(tree.model), []
    microbatches = int(tree.settings["microbatches"])
    for _ in range(tree.steps):
        plain.zero_grad()
        for part in tree.batch.chunk(microbatches):
            plain(part).square().mean().backward()
        expected.append({name: p.grad / microbatches for name, p in plain.named_parameters() if p.grad is not None})

    def main(runtime: Runtime) -> list[dict[str, torch.Tensor]]:
        module = copy.deepcopy(tree.model)
        for name, rank in tree.places.items():
            smp.set_partition(module.get_submodule(name), rank)
        divided = smp.DistributedModel(module)

        @smp.step
        def train(part: torch.Tensor) -> torch.Tensor:
            loss = divided(part).square().mean()
            divided.backward(loss)
            return loss

        found = []
        for _ in range(tree.steps):
            divided.zero_grad()
            train(tree.batch)
            own = {name: p for name, p in module.named_parameters() if not is_sentinel(p)}
            found.append({name: p.grad.clone() for name, p in own.items() if p.grad is not None})
        return found

    static = {"static_mode": True, "fast_mode": True, "static_steps": 1}
    results = job.run(main, {"auto_partition": False, "default_partition": 0, **tree.settings, **static})
    for result in results:
        if isinstance(result, BaseException):
            raise result
    for step, wanted in enumerate(expected):
        found = {name: gradient for result in results for name, gradient in result[step].items()}
        if found.keys() != wanted.keys():
            return f"step {step}: gradients of {sorted(found.keys() ^ wanted.keys())} are there once only"
        for name, gradient in wanted.items():
            if float((found[name] - gradient).abs().max()) > 1e-10 * float(gradient.abs().max()):
                return f"step {step}: the gradient of {name}"
    return None if job.rests else "frames or requests are left"


def try_seeds(seeds: range) -> dict[str, list[int]]:
    """The seeds by what comes of their trees: ``exact``, ``wrong``, ``hung`` or ``refused``."""
    found: dict[str, list[int]] = {"exact": [], "wrong": [], "hung": [], "refused": []}
    with in_process_ranks():
        jobs = {ranks: Job(ranks) for ranks in (2, 3)}
        for seed in seeds:
            tree = draw(seed)
            try:
                why = difference(jobs[tree.ranks], tree)
                verdict = "exact" if why is None else "wrong"
            except (StallError, TimeoutError) as error:
                verdict, why = "hung", str(error)
                jobs[tree.ranks] = Job(tree.ranks)
            except Exception as error:
                verdict, why = "refused", f"{type(error).__name__}: {error}"
            found[verdict].append(seed)
            if why is not None:
                print(f"seed {seed} is {verdict}: {why[:300]}", file=sys.stderr, flush=True)
        for job in jobs.values():
            job.close()
    return found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Random calls over ranks in static and fast mode.")
    parser.add_argument("--count", type=int, default=600, help="how many trees")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = try_seeds(range(arguments.start, arguments.start + arguments.count))
    print(json.dumps({verdict: len(seeds) for verdict, seeds in found.items()}))
    return int(any(seeds for verdict, seeds in found.items() if verdict != "exact"))


if __name__ == "__main__":
    sys.exit(main())
