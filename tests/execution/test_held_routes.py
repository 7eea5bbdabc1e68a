"""Results that stay where they are made go through shared memory to who asks for them, in real processes."""

import json
from pathlib import Path

import pytest

from tests.jobs.ranks import outputs_of_ranks

PROGRAM = Path(__file__).with_name("held_program.py")


@pytest.mark.parametrize("keys", [{}, {"transport": "shared_memory", "static_mode": True, "static_steps": 1}])
def test_large_held_tensors_go_through_shared_memory(keys: dict[str, object]) -> None:
    for output in outputs_of_ranks(PROGRAM, json.dumps(keys)):
        found = json.loads(output)
        sent = {route: counts["bytes_sent"] for route, counts in found["routes"].items()}
        assert found["fallbacks"] == {}
        # Each step at least two results, or their gradients, of each of two microbatches.
        assert sent["shared_memory"] >= 3 * 2 * 2 * 64 * 2048 * 8
        assert sent["host_staged"] == sent["tcp"] == 0
