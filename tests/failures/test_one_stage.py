"""Where one rank runs a whole model, a failed step puts back what its modules hold, as in a pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).parent / "programs" / "one_stage.py"


@pytest.mark.parametrize("ranks", [1, 2])
def test_state_of_every_kind_is_put_back(ranks: int) -> None:
    outputs = outputs_of_ranks(PROGRAM, ranks=ranks)
    assert all("put back" in output for output in outputs)
