"""Activation checkpointing: strategies on modules of one rank and of several, under every schedule and mode."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..cases import DividedCase, MemoryCase, PipelineCase

if TYPE_CHECKING:
    from torch import nn

NAME = "activation_checkpointing"
#: On every ``nn.Sequential``; on the whole model; on each module in a list or sequence, and with other arguments; and
#: by calls in the code of the model.
STRATEGIES = ("each", "contiguous", "group_2", "group_3")
HOWS = (*STRATEGIES, "whole", "layers", "layers nested", "layers from step 2", "calls")
STATIC = (("static_mode", True), ("fast_mode", True), ("static_steps", 2))
SCHEDULES = ("simple", "interleaved", "looped", "zero_bubble")
PLACES = ((1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (1, 2))


def _cases() -> Iterator[MemoryCase]:
    for number, (problem, how) in enumerate(itertools.product(("layers", "layers with state", "attention"), HOWS)):
        pp, dp = PLACES[number % len(PLACES)]
        if problem == "layers with state":  # one process has what Python keeps once, and not for each replica
            pp, dp = 1 + number % 3, 1
        schedule = SCHEDULES[number % len(SCHEDULES)]
        yield _case(problem, how, pp, dp, schedule)
        yield _case(problem, how, 2 + number % 2, 1, SCHEDULES[(number + 1) % 4], keys=STATIC)
    for number, how in enumerate(("each", "whole", "layers", "layers nested", "calls")):
        yield _case("large layers", how, 2 + number % 2, 1, SCHEDULES[number % 4])
        yield _case("layers", how, 3, 1, "interleaved", delayed=True)
        yield _case("structures", how, 2 + number % 2, 1 + number // 4, SCHEDULES[number % 4])
        yield _case("shared", how, 2 + number % 2, 1, SCHEDULES[number % 4], keys=STATIC if number % 2 else ())
    for schedule in ("list", "program.csv", "program.txt"):
        yield _case("layers", "layers", 2, 1, schedule, microbatches=4)
    yield _case("layers", "layers", 2, 1, "auto", microbatches=4, steps=7)
    for seed, how in enumerate(("whole", "layers", "contiguous")):
        yield _case("layers with state", how, 3, 1, "interleaved", partition=seed + 1)
    for number, problem in enumerate(("GPT-2", "T5", "BERT", "Llama", "ResNet, in-place")):
        for turn, how in enumerate(("layers", "whole")):
            yield _case(problem, how, 2 + turn, 1 + number % 2, SCHEDULES[(number + turn) % 4])
    yield _case("GPT-2", "layers", 3, 1, "interleaved", keys=STATIC)
    for number, problem in enumerate(("GPT-2", "T5", "Llama", "BERT", "DistributedTransformer")):
        for turn, (pp, tp, rdp) in enumerate(((1, 2, 1), (2, 2, 1), (1, 2, 2))):
            how = ("layers", "whole", "layers nested")[(number + turn) % 3]
            yield DividedCase(
                problem,
                pp,
                tp * rdp,
                "interleaved",
                2,
                tp=tp,
                optimize=("speed", "memory")[turn % 2],
                batches=("different", "same", "unequal")[(number + turn) % 3],
                feature=NAME,
                how=how,
            )


def _case(problem: str, how: str, pp: int, dp: int, schedule: str, *, microbatches: int = 4, **more: Any) -> MemoryCase:
    # Only a user's own programs are for a certain number of microbatches; sums over replicas take longer.
    return PipelineCase(problem, pp, dp, schedule, microbatches if dp == 1 else 2, feature=NAME, how=how, **more)


CASES = list(_cases())


def ways(case: MemoryCase) -> list[str]:
    """What it does."""
    return [case.how]


def configuration(case: MemoryCase) -> dict[str, Any]:
    """What ``smp.init`` gets besides: nothing."""
    return {}


def failure(case: MemoryCase, rows: list[dict[str, Any]]) -> str | None:
    """Why the feature had not the effect that it should have; None if it had."""
    numbers = [row["recomputed"] for row in rows]
    on_one_rank = case.problem == "structures" and case.how in STRATEGIES
    if sum(number > 0 for number in numbers) < min(1 if on_one_rank else 2, case.pp):
        return f"second computations by rank: {', '.join(map(str, numbers))}"
    return None


def problem_of(case: MemoryCase, problem: Any) -> Any:
    """The problem as it is."""
    return problem


def before_step(models: dict[str, Any], case: MemoryCase, step: int) -> None:
    """Mark modules of the models on this rank."""
    import shardwright as smp

    how, _, since = case.how.partition(" from step ")
    if step != int(since or 0):
        return
    for model in models.values():
        if how == "calls":
            model.module.calls = True
        elif how == "whole":
            smp.set_activation_checkpointing(model)
        elif how in STRATEGIES:
            for sequence in _sequences(model.module):
                smp.set_activation_checkpointing(sequence, strategy=how)
        else:
            for layer in _layers(model.module):
                smp.set_activation_checkpointing(layer)
                for part in layer.children() if how == "layers nested" else ():
                    if _is_called(part):
                        smp.set_activation_checkpointing(part)


def _sequences(module: nn.Module) -> list[Any]:
    from torch import nn

    return [part for part in module.modules() if type(part) is nn.Sequential and len(part) > 2]


def _layers(module: nn.Module) -> list[nn.Module]:
    from torch import nn

    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    inner = {part for one in lists for child in one for part in child.modules() if part is not child}
    return [child for one in lists if one not in inner for child in one if _is_called(child)]


def _is_called(module: nn.Module) -> bool:
    from torch import nn

    return not isinstance(module, nn.ModuleList | nn.ModuleDict)
