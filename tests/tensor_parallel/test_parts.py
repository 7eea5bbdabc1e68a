"""Embeddings, parallel linears, and the tools of custom modules are exact over ranks, and count what they send."""

from pathlib import Path

import pytest

from tests.ranks import outputs_of_ranks

PROGRAM = Path(__file__).with_name("program.py")
PARTS = ("embeddings", "parallel linears", "vocabulary", "custom")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_are_exact(ranks: int) -> None:
    outputs = outputs_of_ranks(PROGRAM, *PARTS, ranks=ranks)
    for output in outputs:
        assert [line for line in output.splitlines() if line.endswith(" hold")] == [f"{part} hold" for part in PARTS]
    # What is refused is refused on every rank, in the same words.
    assert len({tuple(line for line in output.splitlines() if line.startswith("refused: ")) for output in outputs}) == 1
