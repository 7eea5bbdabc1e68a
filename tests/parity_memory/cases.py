"""The table of cases: which problem, with which feature, on which grid. Needs no torch."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from tests.parity.cases import Case
from tests.parity.pairwise import factors as factors_of_grid
from tests.parity_tp.cases import TensorCase
from tests.parity_tp.cases import factors as factors_of_tensors

from . import features


@dataclass(frozen=True)
class PipelineCase(Case):
    """A problem with a feature on a grid of pipeline and data-parallel ranks.

    Attributes:
        feature: The feature's file in ``features``.
        how: What the feature does, in its own words.
    """

    feature: str = ""
    how: str = ""

    @property
    def more(self) -> list[str]:
        """What is unusual about it, in words."""
        return [self.how, *super().more]


@dataclass(frozen=True)
class DividedCase(TensorCase):
    """A problem of tensor parallelism with a feature, as :class:`PipelineCase` has it."""

    feature: str = ""
    how: str = ""

    @property
    def name(self) -> str:
        """A name without spaces, for choosing cases."""
        return f"{super().name}-{self.how.replace(' ', '-')}"


@dataclass(frozen=True)
class HalfCase(Case):
    """Training in half precision: bit for bit the recipe of ``tests/half_precision``, and near float32.

    Attributes:
        tp: The tensor parallelism degree; its ranks count among the data-parallel ones.
        feature: The feature's file in ``features``.
        how: The dtype's key, and what is done beside it.
    """

    tp: int = 1
    feature: str = ""
    how: str = ""

    @property
    def more(self) -> list[str]:
        """What is unusual about it, in words."""
        steps = [f"{self.steps} steps", *([f"tp {self.tp}"] if self.tp > 1 else [])]
        return [self.how, *steps, *super().more]


MemoryCase = PipelineCase | DividedCase | HalfCase
#: In the order of the table.
KINDS = (PipelineCase, DividedCase, HalfCase)


def all_cases() -> list[MemoryCase]:
    """The cases of all features, those of one topology together."""
    found: list[MemoryCase] = []
    for module in pkgutil.iter_modules(features.__path__):
        found += importlib.import_module(f"{features.__name__}.{module.name}").CASES
    return sorted(found, key=lambda case: (KINDS.index(type(case)), case.topology))


def feature_of(case: MemoryCase) -> Any:
    """The file of a case's feature."""
    return importlib.import_module(f"{features.__name__}.{case.feature}")


def factors(case: MemoryCase) -> list[Hashable]:
    """The settings of a case, but for its problem."""
    grid = factors_of_tensors(case) if isinstance(case, DividedCase) else factors_of_grid(case)
    return [*grid, ("feature", case.feature, case.how)]


def few(case: MemoryCase) -> list[Hashable]:
    """What a small choice of cases covers."""
    kind = type(case).__name__
    ways = [(kind, case.feature, way) for way in feature_of(case).ways(case)]
    return [*ways, (case.feature, case.schedule), (kind, case.pp > 1, case.dp > 1)]
