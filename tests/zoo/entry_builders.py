"""What makes entries: of hand-written modules, and of tiny models of ``transformers`` with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from torch import nn

from tests.parity import models_language
from tests.parity.models_control import WIDTH
from tests.parity.models_language import causal_step, tokens
from tests.parity.problem import Phase, Problem, StepBody, normal, one, square_loss

from .entry import Entry

#: Sizes under the names that most configurations use. Enough layers for four ranks, and a small vocabulary, so that
#: embeddings are no more than a part of the whole.
SIZES: dict[str, Any] = {**models_language.SIZES, "num_hidden_layers": 5}


def model(name: str, **keys: Any) -> Callable[[], nn.Module]:
    """The builder of the model class with this name, from these keys of its configuration."""

    def build() -> nn.Module:
        kind: Any = getattr(transformers, name)
        result: nn.Module = kind(kind.config_class(**keys))
        return result

    return build


def entry(
    build: Callable[[], nn.Module], batch: Any, body: StepBody, kind: str, reason: str, depths: tuple[int, ...] = (2, 4)
) -> Entry:
    """An entry with one model and one step function."""
    problem = Problem(build=one(build), batch=batch, phases=(Phase(body=body),))
    return Entry(problem=problem, kind=kind, reason=reason, depths=depths)


def causal(build: Callable[[], nn.Module], reason: str, kind: str = "decoder", **more: Any) -> Entry:
    """An entry that predicts the next token."""
    return entry(build, tokens, causal_step, kind, reason, **more)


def spread(*names: str) -> Callable[[int], dict[str, int]]:
    """Pins that put these modules of the model, in this order, on all ranks of a pipeline, about as many on each."""
    return lambda pp: {f"model.{name}": index * pp // len(names) for index, name in enumerate(names)}


def numbered(name: str, count: int = 4) -> tuple[str, ...]:
    """The names of this many modules in a list."""
    return tuple(f"{name}.{index}" for index in range(count))


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
