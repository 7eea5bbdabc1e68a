"""The table of cases: which problem, on which grid. Needs no torch, so that the driver starts at once."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Case:
    """A problem on a grid.

    Attributes:
        problem: The problem's name.
        pp: The pipeline degree.
        dp: The data-parallel degree.
        schedule: The pipeline schedule.
        microbatches: The number of microbatches.
        average: Whether gradients are averaged over microbatches, not summed.
        keys: Further configuration keys, with their values.
        options: Further arguments of ``smp.DistributedModel``.
        partition: The seed of a random partition; None places modules as the problem says.
        steps: The number of training steps.
        delayed: Whether parameters get their values only where they are owned.
        life: What was done with the models before they are wrapped (:mod:`tests.parity.lives`); None for nothing.
        collects: Whether models of ``transformers`` are told to collect outputs, which are compared.
    """

    problem: str
    pp: int
    dp: int
    schedule: str
    microbatches: int
    average: bool = True
    keys: tuple[tuple[str, Any], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    partition: int | None = None
    steps: int = 5
    delayed: bool = False
    life: str | None = None
    collects: bool = False

    @property
    def name(self) -> str:
        """A name without spaces, for choosing cases."""
        words = self.problem.replace(",", "").replace("'", "").replace(" ", "-")
        more = "".join(f"-{part.replace(' ', '-').replace('=', '-')}" for part in self.more)
        return f"{words}-pp{self.pp}-dp{self.dp}-{self.schedule}-mb{self.microbatches}{more}"

    @property
    def more(self) -> list[str]:
        """What is unusual about it, in words."""
        settings = [f"{key}={value}" for key, value in (*self.keys, *self.options)]
        if self.partition is not None:
            settings.append(f"partition {self.partition}")
        if self.delayed:
            settings.append("delayed")
        if self.life is not None:
            settings.append(self.life)
        if self.collects:
            settings.append("collects")
        return settings if self.average else ["summed", *settings]

    @property
    def topology(self) -> tuple[int, int]:
        """Cases with the same topology share a job."""
        return self.pp, self.dp


#: Pipeline degree, data-parallel degree, schedule and number of microbatches.
Place = tuple[int, int, str, int]

_GRIDS: dict[str, tuple[Place, ...]] = {
    "GPT-2, changing length": ((2, 1, "interleaved", 2), (3, 2, "simple", 2)),
    "GPT-2, generation": ((2, 1, "interleaved", 2), (3, 1, "simple", 1)),
    "BERT": ((2, 1, "interleaved", 4), (3, 1, "simple", 2), (2, 2, "simple", 2)),
    "RoBERTa": ((2, 1, "simple", 4), (3, 1, "interleaved", 2)),
    "ALBERT": ((2, 1, "interleaved", 2), (3, 1, "interleaved", 4), (2, 2, "simple", 1)),
    "Llama": ((2, 1, "interleaved", 4), (3, 1, "simple", 2), (2, 2, "interleaved", 2)),
    "Mixtral": ((2, 1, "interleaved", 4), (3, 1, "interleaved", 2)),
    "Mixtral, router loss": ((2, 1, "simple", 2), (3, 1, "interleaved", 2)),
    "ResNet, in-place": ((2, 1, "simple", 4), (3, 1, "interleaved", 2), (2, 2, "interleaved", 2)),
    "ResNet, cut inside blocks": ((2, 1, "interleaved", 2), (3, 2, "interleaved", 4)),
    "ResNet of transformers": ((2, 1, "interleaved", 2),),
    "DeBERTa": ((2, 1, "interleaved", 2),),
    "Mamba": ((3, 1, "simple", 2),),
    "GPT-NeoX": ((2, 1, "simple", 4),),
    "BLOOM": ((3, 1, "interleaved", 4),),
    "Gemma": ((2, 1, "interleaved", 2),),
    "Qwen": ((3, 1, "simple", 2),),
    "BART": ((2, 1, "interleaved", 4), (3, 1, "simple", 2)),
    "ViT": ((2, 1, "simple", 2),),
    "Swin": ((3, 1, "interleaved", 2),),
    "ConvNeXt": ((2, 1, "interleaved", 4),),
    "CLIP": ((2, 1, "interleaved", 2), (3, 1, "simple", 4)),
    "Whisper": ((2, 1, "simple", 2),),
    "GPT-2, every layer's states": ((2, 1, "interleaved", 2), (3, 1, "simple", 4)),
    "GPT-2, checkpointing": ((2, 1, "simple", 2), (3, 1, "interleaved", 4)),
    "Llama, reentrant checkpointing": ((2, 1, "interleaved", 2),),
    "attributes kept between calls": ((2, 1, "interleaved", 4), (3, 1, "simple", 4)),
    "conditional": ((2, 1, "interleaved", 4), (3, 2, "simple", 4), (2, 2, "interleaved", 2)),
    "skip over two stages": ((3, 1, "interleaved", 4), (2, 2, "simple", 2)),
    "shared parameter": ((3, 1, "simple", 4), (2, 2, "interleaved", 1)),
    "two losses, summed": ((2, 1, "interleaved", 4), (3, 1, "simple", 2)),
    "two losses, one backward": ((3, 1, "interleaved", 2),),
    "two losses, two backwards": ((2, 1, "interleaved", 2), (3, 1, "simple", 4)),
    "two backwards in turn": ((2, 1, "simple", 2), (3, 1, "interleaved", 4)),
    "frozen first half": ((3, 1, "simple", 2), (3, 2, "interleaved", 2)),
    "frozen second half": ((2, 1, "interleaved", 4), (3, 1, "interleaved", 2)),
    "nested spanning": ((3, 1, "interleaved", 4), (3, 1, "simple", 2), (3, 2, "interleaved", 2)),
    "visited many times": ((2, 1, "interleaved", 4), (3, 1, "simple", 2)),
    "branches": ((2, 2, "interleaved", 2), (3, 1, "interleaved", 4)),
    "checkpoint": ((2, 1, "interleaved", 2), (3, 1, "simple", 2)),
    "checkpoint, reentrant": ((2, 1, "simple", 4),),
    "hooks": ((2, 1, "interleaved", 4), (3, 1, "simple", 1)),
    "sparse gradient": ((3, 1, "interleaved", 2), (2, 2, "simple", 2)),
    "LSTM and attention": ((2, 1, "simple", 2), (3, 1, "interleaved", 4)),
    "long runs": ((2, 1, "interleaved", 2), (3, 1, "simple", 4)),
    "stage without parameters": ((3, 1, "interleaved", 2), (3, 2, "simple", 2)),
    "root without parameters": ((3, 1, "simple", 2), (3, 2, "interleaved", 2)),
    "values of many types": ((2, 1, "interleaved", 4), (3, 1, "simple", 2)),
    "keyword-only arguments": ((2, 1, "interleaved", 2), (3, 1, "interleaved", 1)),
    "output without gradient": ((2, 1, "simple", 2), (3, 1, "interleaved", 4)),
    "child writes its input": ((2, 1, "interleaved", 4), (3, 1, "simple", 1)),
    "child returns views": ((2, 1, "simple", 2), (3, 1, "interleaved", 2)),
    "unusual layouts": ((2, 1, "interleaved", 4), (3, 1, "simple", 2)),
    "methods of the model": ((2, 1, "simple", 2), (3, 1, "interleaved", 2)),
    "inputs split differently": ((2, 1, "interleaved", 2), (2, 2, "simple", 4)),
    "parameter as argument": ((2, 1, "interleaved", 2), (3, 1, "simple", 2)),
    "parameter as result": ((2, 1, "simple", 2), (3, 2, "interleaved", 2)),
    "complex numbers": ((2, 1, "interleaved", 4), (3, 1, "simple", 2)),
    "parametrized": ((3, 1, "interleaved", 2),),
    "own buffers": ((2, 1, "interleaved", 4), (2, 2, "simple", 2), (3, 1, "interleaved", 2)),
    "partly used results": ((2, 1, "simple", 2), (3, 2, "interleaved", 4)),
    "custom functions": ((2, 1, "interleaved", 2), (3, 1, "simple", 4)),
    "many hops": ((2, 1, "interleaved", 4), (3, 1, "simple", 2)),
    "lists of parameters": ((2, 1, "simple", 2), (3, 1, "interleaved", 2)),
    "two precisions": ((2, 1, "interleaved", 2),),
    "retained gradient": ((2, 1, "simple", 2), (3, 1, "interleaved", 2)),
    "in-place loss": ((2, 1, "interleaved", 2), (3, 1, "simple", 4)),
    "groups, schedule and clipping": ((2, 1, "interleaved", 2), (2, 2, "simple", 2), (3, 1, "simple", 2)),
    "clipping, GPT-2": ((2, 1, "simple", 2), (3, 2, "interleaved", 2)),
    "freezing in between": ((2, 1, "interleaved", 2), (3, 2, "simple", 2)),
    "GAN": ((2, 1, "interleaved", 4), (3, 1, "simple", 2), (2, 2, "simple", 2)),
    "gradient accumulation": ((2, 1, "interleaved", 2), (2, 2, "interleaved", 2)),
    "evaluation in between": ((2, 1, "simple", 4), (3, 1, "interleaved", 2)),
    "inference mode in between": ((2, 1, "interleaved", 2), (3, 1, "simple", 2)),
    # Rounded sums depend on their order, so no more than two microbatches.
    "autocast": ((2, 1, "interleaved", 2), (3, 1, "simple", 2)),
    "evaluation of a ResNet": ((2, 2, "interleaved", 2),),
    "frozen teacher": ((2, 1, "interleaved", 2), (3, 1, "simple", 4)),
    "frozen teacher, GPT-2": ((2, 1, "interleaved", 4),),
}
#: Callers go on before results are there in the last of five steps at least.
_STATIC = (("static_mode", True), ("fast_mode", True), ("static_steps", 2))
_WITHOUT_HANDLES = (("tensor_handles", False),)
#: Problems on every schedule and degree.
_FULL = ("GPT-2", "T5")
_UNUSUAL = (
    Case("GPT-2", 2, 1, "interleaved", 4, average=False),
    Case("two losses, summed", 2, 2, "simple", 2, average=False),
    Case("gradient accumulation", 2, 2, "interleaved", 4, average=False),
    Case("T5", 3, 1, "interleaved", 8, keys=(("active_microbatches", 2),)),
    Case("GPT-2", 2, 1, "interleaved", 8, keys=(("active_microbatches", 1),)),
    Case("GPT-2", 2, 2, "interleaved", 2, keys=(("placement_strategy", "spread"),)),
    Case("Llama", 3, 1, "interleaved", 2, keys=(("memory_weight", 0.0),)),
    Case("BERT", 2, 1, "simple", 2, keys=(("skip_tracing", True),)),
    Case("T5", 2, 2, "simple", 2, options=(("overlapping_allreduce", False),)),
    Case("GPT-2", 2, 2, "interleaved", 4, options=(("bucket_cap_mb", 0.01), ("gradient_as_bucket_view", True))),
    Case("ResNet, in-place", 2, 2, "simple", 2, options=(("broadcast_buffers", False),)),
    Case("GPT-2", 2, 1, "looped", 4),
    Case("GPT-2", 3, 2, "looped", 4, keys=_STATIC),
    Case("GPT-2", 2, 1, "looped", 8, keys=(("active_microbatches", 1),)),
    Case("long runs", 3, 1, "looped", 4),
    Case("long runs", 2, 1, "looped", 8, keys=_STATIC),
    Case("visited many times", 3, 1, "looped", 4),
    Case("many hops", 2, 1, "looped", 4, keys=_STATIC),
    Case("two losses, two backwards", 3, 1, "looped", 4),
    Case("frozen first half", 3, 1, "looped", 4),
    Case("GPT-2", 2, 1, "zero_bubble", 4),
    Case("GPT-2", 3, 2, "zero_bubble", 4),
    Case("GPT-2", 3, 1, "zero_bubble", 8, keys=(("active_microbatches", 1),)),
    Case("GPT-2", 2, 1, "zero_bubble", 4, keys=(("deterministic_server", True),)),
    Case("GPT-2", 2, 2, "list", 4),
    Case("GPT-2", 2, 2, "program.csv", 4),
    Case("GPT-2", 2, 1, "program.txt", 4, keys=(("deterministic_server", True),)),
    Case("GPT-2", 2, 2, "auto", 4, steps=7),
    Case("GPT-2", 3, 1, "auto", 8, steps=7),
    *(
        Case(problem, 2 + number % 2, 1 + number % 4 // 3, "zero_bubble", 4)
        for number, problem in enumerate(
            (
                "T5",
                "BERT",
                "ALBERT",
                "Llama",
                "Mixtral",
                "ResNet, in-place",
                "GPT-2, checkpointing",
                "attributes kept between calls",
                "shared parameter",
                "two losses, two backwards",
                "frozen second half",
                "nested spanning",
                "visited many times",
                "hooks",
                "sparse gradient",
                "LSTM and attention",
                "parametrized",
                "custom functions",
                "retained gradient",
                "GAN",
                "gradient accumulation",
                "clipping, GPT-2",
            )
        )
    ),
)
#: Each life before a model is wrapped, and models that collect, over layouts in turn; ``make zoo`` draws more of them.
_LIVED = (
    Case("GPT-2", 2, 1, "interleaved", 2, steps=2, life="looked", collects=True),
    Case("Mixtral, router loss", 2, 1, "interleaved", 1, steps=2, life="collected", collects=True),
    Case("BERT", 2, 2, "simple", 2, steps=2, life="trained", collects=True),
    Case("Mixtral", 3, 1, "interleaved", 2, steps=2, life="copied", collects=True),
    Case("Llama", 3, 1, "simple", 2, steps=2, life="loaded", collects=True),
)
#: Problems whose parameters are made in many ways, or used so.
_DELAYED = (
    "GPT-2",
    "T5",
    "BERT",
    "Mixtral",
    "Swin",
    "ConvNeXt",
    "ResNet, cut inside blocks",
    "shared parameter",
    "hooks",
    "sparse gradient",
    "LSTM and attention",
    "complex numbers",
    "parametrized",
    "lists of parameters",
    "two precisions",
    "groups, schedule and clipping",
    "inference mode in between",
    "frozen teacher, GPT-2",
)


#: Seeds of random partitions, each for one in so many of the problems.
_SEEDS = (1, 2, 3)
_ONE_IN = 8


def all_cases() -> list[Case]:
    """Every case, those of one topology together."""
    random = [
        case
        for case in with_partitions(_SEEDS)
        if zlib.crc32(f"{case.problem} {case.partition}".encode()) % _ONE_IN == 0
    ]
    return _grouped([*_cases(), *random, *_LIVED])


def with_partitions(seeds: Iterable[int]) -> list[Case]:
    """Every problem once for each seed of a random partition, on the place with most ranks and microbatches."""
    places: dict[str, Case] = {}
    for case in sorted(_cases(), key=lambda case: (-case.dp, case.pp, case.microbatches)):
        places[case.problem] = case
    return _grouped(replace(case, partition=seed) for seed in seeds for case in places.values())


def _grouped(cases: Iterable[Case]) -> list[Case]:
    return sorted(cases, key=lambda case: case.topology)


def _cases() -> Iterator[Case]:
    for problem in _FULL:
        for place in itertools.product((2, 3), (1, 2), ("simple", "interleaved"), (1, 2, 4)):
            yield Case(problem, *place)
        for place in ((3, 1, "interleaved", 4), (2, 2, "zero_bubble", 4)):
            yield Case(problem, *place, keys=_STATIC)
    for problem, places in _GRIDS.items():
        first, *others = (Case(problem, *place) for place in places)
        yield replace(first, keys=_STATIC)
        yield replace(first, keys=_WITHOUT_HANDLES)
        yield from others
    yield from _UNUSUAL
    for number, problem in enumerate(_DELAYED):
        yield Case(problem, 2 + number % 2, 1 + number % 4 // 3, "interleaved", 2, delayed=True)
