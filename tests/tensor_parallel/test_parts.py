"""Embeddings, parallel linears, and the tools of custom modules are exact over ranks, and count what they send."""

from pathlib import Path

import pytest

from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).with_name("program.py")
BACK_ENDS = [("process_group", 1), pytest.param("process_group", 2, marks=pytest.mark.slow), ("messages", 4)]
PARTS = ("embeddings", "parallel linears", "vocabulary", "custom")


@pytest.mark.parametrize(("back_end", "ranks"), BACK_ENDS)
def test_parts_are_exact(back_end: str, ranks: int) -> None:
    outputs = outputs_of_ranks(PROGRAM, back_end, *PARTS, ranks=ranks)
    for output in outputs:
        assert [line for line in output.splitlines() if line.endswith(" hold")] == [f"{part} hold" for part in PARTS]
    # What is refused is refused on every rank, in the same words.
    assert len({tuple(line for line in output.splitlines() if line.startswith("refused: ")) for output in outputs}) == 1
