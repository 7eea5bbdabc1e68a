"""Random programs: exact or refused, never silently wrong; ``python -m tests.frames.programs`` tries many more."""

from __future__ import annotations

import collections
import warnings

from tests.frames.programs import try_program

SEEDS = range(300)
#: Programs that once went wrong.
FOUND = (
    *(1319, 1339, 1403, 2147, 2200, 2222, 3104, 3471, 10201, 21301, 21651, 38426, 39959, 40348, 41404, 41639, 49430),
    *(108932, 118439, 122701, 217466, 224243, 310449),
    *(1, 12, 21, 24, 30, 62, 63, 82, 93, 101, 127, 157, 158, 173, 177, 184, 219, 253, 300, 301, 310, 317, 323, 327),
)


def test_random_programs_are_exact_or_refused() -> None:
    outcomes: collections.Counter[str] = collections.Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in (*SEEDS, *FOUND):
            outcome, why = try_program(seed)
            assert outcome != "WRONG", f"seed {seed}: {why}"
            outcomes[outcome] += 1
    assert outcomes["exact"] > 200
    assert outcomes["refused"] < outcomes["exact"] / 10
