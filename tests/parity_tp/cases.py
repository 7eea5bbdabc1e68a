"""The table of cases: which problem, at which degrees, in which mode, with which batches. Needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

from tests.parity.cases import Case

OPTIMIZE = ("speed", "memory")
#: What tp ranks bring: the same samples, the same with ``prescaled_batch``, their own, their own of different numbers.
BATCHES = ("same", "prescaled", "different", "unequal")
#: Pipeline degree, tensor degree, and how many ranks hold the same parameters.
Place = tuple[int, int, int]
PLACES: tuple[Place, ...] = ((1, 2, 1), (1, 4, 1), (2, 2, 1), (2, 4, 1))
#: Tensor parallelism beside data parallelism, for a few problems.
REPLICATED: tuple[Place, ...] = ((1, 2, 2),)

#: Modules of ``smp.nn``, each between two linear layers.
MODULES = (
    "DistributedLinear",
    "DistributedEmbedding",
    "DistributedLayerNorm",
    "DistributedRMSNorm",
    "DistributedAttentionLayer",
    "DistributedAttentionLayer, cross",
    "DistributedTransformerOutputLayer",
    "DistributedTransformerLayer",
    "DistributedTransformerLayer, cross",
    "DistributedTransformerLayer, parallel",
    "DistributedTransformerLayer, gated",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "VocabularyParallelEmbedding",
    "ColumnParallelLinear and RowParallelLinear",
    "ColumnParallelLinear and RowParallelLinear, sequence",
    "ColumnParallelLinear and RowParallelLinear, asynchronous",
    "vocabulary_parallel_cross_entropy",
    "FlashAttentionLayer",
    "FusedLayerNorm",
)
#: Models of ``transformers``, whole.
MODELS = (
    "GPT-2",
    "GPT-2, cross-attention",
    "BERT",
    "RoBERTa",
    "GPT-J",
    "GPT-Neo",
    "GPT-NeoX",
    "GPT-NeoX, sequential",
    "T5",
    "ViT",
    "Llama",
    "Mistral",
    "Qwen3",
    "Mixtral",
)
#: Those that send nothing, at least for speed.
SILENT = ("DistributedLayerNorm", "DistributedRMSNorm", "FlashAttentionLayer", "FusedLayerNorm")
#: The kinds of batches of problems that have not all: activations are the same on all ranks, or slices of one size.
_ONLY: dict[str, tuple[str, ...]] = {
    "ColumnParallelLinear and RowParallelLinear": ("prescaled",),
    "ColumnParallelLinear and RowParallelLinear, sequence": ("same", "different"),
    "ColumnParallelLinear and RowParallelLinear, asynchronous": ("same", "different"),
    "vocabulary_parallel_cross_entropy": ("prescaled",),
}


@dataclass(frozen=True)
class TensorCase(Case):
    """A problem at tensor, pipeline and data-parallel degrees.

    Attributes:
        tp: The tensor parallelism degree.
        optimize: The configuration's ``optimize``.
        batches: One of ``BATCHES``.
    """

    tp: int = 2
    optimize: str = "speed"
    batches: str = "different"

    @property
    def name(self) -> str:
        """A name without spaces, for choosing cases."""
        words = self.problem.replace(",", "").replace(" ", "-")
        rdp = f"-rdp{self.rdp}" if self.rdp > 1 else ""
        delayed = "-delayed" if self.delayed else ""
        return f"{words}-pp{self.pp}-tp{self.tp}{rdp}-{self.optimize}-{self.batches}{delayed}"

    @property
    def rdp(self) -> int:
        """How many ranks hold the same parameters."""
        return self.dp // self.tp


def factors(case: TensorCase) -> list[Hashable]:
    """The settings of a case, but for its problem; what a problem's batches are depends on it."""
    place = ("place", case.pp, case.tp, case.rdp)
    return [place, ("optimize", case.optimize), ("batches", case.batches), ("delayed", case.delayed)]


def cases(every: bool = False) -> list[TensorCase]:
    """The cases, those of one topology together.

    Args:
        every: The whole product. Otherwise every problem meets all four kinds of batches and both modes at degrees
            (1, 2), both modes at each other place but the last, and one mode there; problems take turns with batches.
            Every model is made once with delayed parameters.
    """
    return sorted([*(_all() if every else _some()), *_delayed()], key=lambda case: case.topology)


def _case(problem: str, place: Place, optimize: str, batches: str) -> TensorCase:
    pp, tp, rdp = place
    return TensorCase(problem, pp, tp * rdp, "interleaved", 2, tp=tp, optimize=optimize, batches=batches)


def _delayed() -> Iterator[TensorCase]:
    for number, problem in enumerate(MODELS):
        yield replace(_case(problem, PLACES[2], OPTIMIZE[number % 2], "different"), delayed=True)


def _all() -> Iterator[TensorCase]:
    for problem in (*MODULES, *MODELS):
        kinds = _ONLY.get(problem, BATCHES)
        for place, optimize, batches in itertools.product((*PLACES, *REPLICATED), OPTIMIZE, kinds):
            yield _case(problem, place, optimize, batches)


def _some() -> Iterator[TensorCase]:
    for number, problem in enumerate((*MODULES, *MODELS)):
        kinds = _ONLY.get(problem, BATCHES)
        for turn, batches in enumerate(kinds):
            yield _case(problem, PLACES[0], OPTIMIZE[(number + turn) % 2], batches)
        for step, place in enumerate(PLACES[1:]):
            modes = OPTIMIZE if place != PLACES[-1] else OPTIMIZE[number % 2 :][:1]
            for turn, optimize in enumerate(modes):
                yield _case(problem, place, optimize, kinds[(number + step + 2 * turn) % len(kinds)])
        if number % 4 == 0:
            yield _case(problem, REPLICATED[0], OPTIMIZE[number // 4 % 2], kinds[number // 4 % len(kinds)])
