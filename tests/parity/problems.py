"""Every problem by name."""

from __future__ import annotations

from . import (
    models_architectures,
    models_autograd,
    models_control,
    models_language,
    models_training,
    models_values,
    models_vision,
)
from .cases import all_cases
from .problem import Problem

PROBLEMS: dict[str, Problem] = {
    **models_language.PROBLEMS,
    **models_vision.PROBLEMS,
    **models_architectures.PROBLEMS,
    **models_control.PROBLEMS,
    **models_values.PROBLEMS,
    **models_autograd.PROBLEMS,
    **models_training.PROBLEMS,
}


def check_names() -> None:
    """Raise if the table of cases and the problems do not name the same things."""
    different = PROBLEMS.keys() ^ {case.problem for case in all_cases()}
    if different:
        raise LookupError(f"a case without a problem, or a problem without a case: {', '.join(sorted(different))}")


check_names()
