"""What users do with ``smp.DistributedModel`` as if it were their module: it works, or is refused with the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).with_name("wrapper_program.py")


@pytest.mark.parametrize("degree", [1, 2])
def test_the_wrapper_can_be_used_as_the_module(degree: int) -> None:
    for output in outputs_of_ranks(PROGRAM, str(degree), ranks=degree):
        assert "a_model_of_transformers_is_saved" in output
