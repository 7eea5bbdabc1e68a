"""What the script of a program does around its steps: one order of things for plain torch and the library.

Events are tuples of a word and what belongs to it:

- ``freeze`` and ``unfreeze``, with the path of a module;
- ``average``, and ``averaged``: an evaluation with the averages;
- ``load``, with the number of the weights; ``state``: the state of the whole model is compared;
- ``save``, and ``resume``: the job goes back to what it has saved.

Kinds of hooks of parameters: ``note`` the gradient, ``halve`` it, ``bend`` it, which is linear in nothing, and after it
is accumulated ``after``, which changes it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from tests.programs.lives import LIVES
from tests.programs.optimizers import BY_ELEMENT, BY_PARAMETER
from tests.programs.program import Program

#: How many programs have what, of those in which it is possible.
_SHARES = {
    "optimizer": 0.4,
    "passes": 0.3,
    "life": 0.2,
    "hooks": 0.2,
    "freezing": 0.25,
    "averages": 0.2,
    "loads": 0.2,
    "saves": 0.3,
    "resumes": 0.1,
}
#: How often a job ends and another one goes on, where that happens at all.
_RESUMES = 3


class Side(Protocol):
    """A program in plain torch, or as one rank of a job."""

    def train(self, step: int) -> None:
        """A step."""

    def update(self, step: int) -> None:
        """An update of weights by the gradients of some steps."""

    def evaluate(self, after: str, step: int, kind: str) -> None:
        """An evaluation."""

    def do(self, step: int, word: str, *details: Any) -> None:
        """Another event."""


def play(program: Program, side: Side, leg: int) -> None:
    """What one of a program's jobs does, after it has resumed the one before and until it is saved."""
    first, last = program.legs()[leg]
    for step in range(first, last):
        for word, *details in program.events_before(step):
            side.do(step, word, *details)
        side.train(step)
        if program.updates_after(step):
            side.update(step)
        for kind in program.evaluations_after(step):
            side.evaluate(f"{step} in {kind}", step, kind)
    if last == program.steps:
        for word, *details in program.events_before(last):
            side.do(last, word, *details)


def of_module(path: str, parameters: dict[str, nn.Parameter]) -> list[nn.Parameter]:
    """The parameters of a module."""
    return [one for name, one in parameters.items() if name.startswith(f"{path}.")]


def bent(gradient: torch.Tensor) -> torch.Tensor:
    """What a hook makes of a gradient."""
    return gradient / (1 + gradient.abs())


#: What hooks of parameters make of gradients.
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "note": torch.clone,
    "halve": lambda gradient: gradient * 0.5,
    "bend": bent,
}


def draw_script(program: Program) -> None:
    """Draw it, beside what the generator drew, so that the modules of a seed stay what they are."""
    draw = random.Random(f"{program.seed} script")
    has = {name: draw.random() < share for name, share in _SHARES.items()}
    parameters = dict(program.start()[0].named_parameters())
    fit = all(one.numel() and one.is_floating_point() for one in parameters.values())
    draw_layout = random.Random(f"{program.seed} layout").random()
    if program.replicas > 1 and not program.sharded:
        program.layout = "tensor" if draw_layout < 0.35 else "sharded_data" if draw_layout < 0.65 else ""
    program.updates = program.updates or bool(program.layout)
    if program.updates and has["passes"]:
        program.passes = 2
    if program.updates and has["resumes"]:
        program.steps = max(program.steps, program.passes * (_RESUMES + 1))
    program.steps = -(-program.steps // program.passes) * program.passes
    between = range(program.passes, program.steps, program.passes)
    if program.updates and has["resumes"]:
        program.resumes = sorted(draw.sample(between, _RESUMES))
    if program.updates and fit and has["optimizer"]:
        kinds = [*BY_PARAMETER, *BY_PARAMETER, *BY_ELEMENT]
        program.optimizer = draw.choice([kind for kind in kinds if kind != "updating"])
    if program.sharded and program.optimizer == "fused_lamb":
        program.optimizer = "lamb"  # the other is refused over shares of parameters
    if program.layout and (not program.optimizer or program.layout == "sharded_data"):
        program.optimizer = draw.choice([*BY_ELEMENT])  # others are refused over shards
    if has["life"]:
        program.life = draw.choice(LIVES)
    if has["hooks"]:
        kinds = ["halve"] if program.replicas > 1 else [*CHANGES, "after"]
        program.hooks = [
            (name, draw.choice(kinds)) for name in draw.sample([*parameters], min(len(parameters), draw.choice((1, 2))))
        ]
    program.events = _drawn_events(program, has, draw)


def _drawn_events(program: Program, has: dict[str, bool], draw: random.Random) -> list[tuple[Any, ...]]:
    """Events, in the order of their steps."""
    before: dict[int, list[tuple[Any, ...]]] = {step: [] for step in range(program.steps + 1)}
    paths = [path for path, module in program.start()[0].named_modules() if path and [*module.parameters()]]
    for step, events in before.items():
        if has["freezing"] and step < program.steps and draw.random() < 0.6:
            events += [(draw.choice(("freeze", "freeze", "unfreeze")), draw.choice(paths)) for _ in range(2)]
        if has["loads"] and draw.random() < 0.35:
            events.append(("load", draw.choice((1, 2))))
        if has["loads"] and draw.random() < 0.35:
            events.append(("state",))
        if has["averages"] and step and draw.random() < 0.7:
            events.append(("average",))
        if has["averages"] and draw.random() < 0.35:
            events.append(("averaged",))
    if program.updates and has["saves"]:
        for first, last in program.legs():
            # What comes before a job's first step is for that job to do, which has nothing to save yet.
            between = range(first + program.passes, last + (last == program.steps), program.passes)
            if len(between) > 1:
                saved, resumed = sorted(draw.sample(between, 2))
                before[saved].append(("save",))
                before[resumed].insert(0, ("resume",))
    return [(step, *event) for step, events in before.items() for event in events]


def features_of(program: Program) -> list[str]:
    """What a program's script makes use of."""
    words = {event[1] for event in program.events}
    found = {
        "tensor parallelism": program.layout == "tensor",
        "sharded data parallelism": program.layout == "sharded_data",
        "optimizers of whole parameters": program.optimizer in BY_PARAMETER,
        "accumulation over steps": program.passes > 1,
        "an earlier life": bool(program.life),
        "hooks of parameters": bool(program.hooks),
        "freezing": "freeze" in words,
        "averages": "average" in words or "averaged" in words,
        "loads": "load" in words,
        "saves and loads": "save" in words,
        "resumes in new jobs": bool(program.resumes),
    }
    return [feature for feature, has in found.items() if has]
