"""Tensor parallelism over ranks with different inputs is exact, and counts what it sends."""

from pathlib import Path
from typing import Any

import pytest

from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).with_name("program.py")
ONE, TWO, FOUR = (("process_group", ranks) for ranks in (1, 2, 4))
MESSAGES_2, MESSAGES_4 = (("messages", ranks) for ranks in (2, 4))
PARTS = ("gradients", "primitives", "counting", "refused", "layers")
LAYERS = ("transformers", "layer rules", "counting layers")


def slow(*cases: tuple[str, int]) -> list[Any]:
    """These cases, in the slow tests only."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("back_end", "ranks"), [*slow(ONE, TWO), MESSAGES_4])
def test_transformer_modules_are_exact(back_end: str, ranks: int) -> None:
    parts = LAYERS if ranks > 1 else LAYERS[:2]
    for output in outputs_of_ranks(PROGRAM, back_end, *parts, ranks=ranks):
        assert output.split("\n") == [*(f"{part} hold" for part in parts), ""]


@pytest.mark.parametrize(("back_end", "ranks"), [ONE, TWO, *slow(MESSAGES_4)])
def test_the_language_model_is_exact(back_end: str, ranks: int) -> None:
    outputs = outputs_of_ranks(PROGRAM, back_end, "language model", ranks=ranks)
    for output in outputs:
        assert output.endswith("language model hold\n")
    # What is refused is refused on every rank, in the same words.
    assert len(set(outputs)) == 1


@pytest.mark.parametrize(("back_end", "ranks"), [ONE, FOUR, MESSAGES_2, *slow(TWO, MESSAGES_4)])
def test_primitives_and_layers_are_exact(back_end: str, ranks: int) -> None:
    parts = ("layers",) if ranks == 1 else (*PARTS, "agreeing") if back_end == "messages" else PARTS
    outputs = outputs_of_ranks(PROGRAM, back_end, *parts, ranks=ranks)
    for output in outputs:
        assert [line for line in output.splitlines() if line.endswith(" hold")] == [f"{part} hold" for part in parts]
    # What is refused is refused on every rank, in the same words.
    assert len({tuple(line for line in output.splitlines() if line.startswith("refused: ")) for output in outputs}) == 1
