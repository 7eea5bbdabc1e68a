"""One rank of a job: the cases that its command line lists."""

from __future__ import annotations

from typing import Any

from tests.generation import calls, evaluation, generates, holding, prompts
from tests.jobs.listed import module_with, run_listed

_MODULES = (calls, evaluation, generates, holding, prompts)


def run(case: dict[str, Any]) -> None:
    """Run a case: a function of a module, and its arguments."""
    given = dict(case)
    name = given.pop("name")
    getattr(module_with(name, _MODULES), name)(**given)


if __name__ == "__main__":
    run_listed(run)
