"""How the hand-written entries are put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tests.parity.models_control import WIDTH
from tests.parity.problem import Phase, Problem, normal, one, square_loss

from .entry import Entry


def spread(*names: str) -> Callable[[int], dict[str, int]]:
    """Pins that put these modules of the model, in this order, on all ranks of a pipeline, about as many on each."""
    return lambda pp: {f"model.{name}": index * pp // len(names) for index, name in enumerate(names)}


def module(
    reason: str,
    build: Callable[[], nn.Module],
    pins: Callable[[int], dict[str, int]] | None,
    *,
    depths: tuple[int, ...] = (2, 4),
    refused: str | None = None,
    **options: Any,
) -> Entry:
    """A hand-written model that takes one tensor and gives one, unless the options of its problem say otherwise."""
    settings: dict[str, Any] = {"batch": normal(WIDTH), "phases": (Phase(body=square_loss),), **options}
    problem = Problem(build=one(build), pins=pins, **settings)
    return Entry(problem=problem, kind="module", reason=reason, depths=depths, refused=refused)
