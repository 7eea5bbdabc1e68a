"""With ``deterministic_server`` the same job gives the same bits, however long its tasks take."""

import json
from pathlib import Path

from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).with_name("deterministic_program.py")


def test_gradients_have_the_same_bits_whatever_the_order_of_requests() -> None:
    rows = [json.loads(output.splitlines()[-1]) for output in outputs_of_ranks(PROGRAM, ranks=3)]
    assert any(len(set(row["any order"])) > 1 for row in rows), "the order of requests never changed a sum"
    assert [len(set(row["one order"])) for row in rows] == [1, 1, 1]
