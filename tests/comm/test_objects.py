"""Objects between the processes of a job: whatever they hold, in whatever order and from whatever thread."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.ranks import outputs_of_ranks

PROGRAM = Path(__file__).parent / "programs" / "objects.py"


def scenarios() -> list[str]:
    """The functions that the program lists, without importing it: it registers types."""
    tree = ast.parse(PROGRAM.read_text())
    listed = [node for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "SCENARIOS"]
    return [element.id for element in listed[0].value.elts]


@pytest.fixture(scope="module")
def passed() -> list[list[str]]:
    """By rank, the scenarios that hold."""
    return [output.split() for output in outputs_of_ranks(PROGRAM, ranks=4)]


@pytest.mark.parametrize("scenario", scenarios())
def test_objects(passed: list[list[str]], scenario: str) -> None:
    assert all(scenario in names for names in passed)
