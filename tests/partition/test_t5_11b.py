"""The paper's own example: its appendix D divides T5-11B twice."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.t5_11b import EXAMPLES, divided, t5_11b


@pytest.mark.slow
def test_the_split_of_the_paper_is_one_of_the_lengths_that_are_assumed() -> None:
    assert [division.split for division in divided(decoder_length=64)] == [(4, 4), (3, 5)]
    assert [division.split for division in divided(decoder_length=512)] == [(3, 5), (3, 5)]


def test_t5_11b_is_divided_as_in_the_paper() -> None:
    assert sum(parameter.numel() for parameter in t5_11b().parameters()) == 11_307_321_344
    for example, division in zip(EXAMPLES, divided(), strict=True):
        assert division.misses(example) == []
        # The rows of the table are all there is.
        assert sum(cost for _, cost, _ in division.rows) == pytest.approx(1.0)
        for rank, cost in enumerate(division.costs):
            assert sum(row for _, row, on in division.rows if on == rank) == pytest.approx(cost)
