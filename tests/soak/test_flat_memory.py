"""Many steps leave nothing behind."""

import json
from pathlib import Path

from tests.jobs.ranks import outputs_of_ranks

STEPS = 1000


def test_a_thousand_steps_leave_no_frame_request_object_or_memory_behind():
    outputs = outputs_of_ranks(Path(__file__).with_name("many_steps.py"), str(STEPS))
    for output in outputs:
        result = json.loads(output.splitlines()[-1])
        assert result["live"] == [[0, 0]], result
        assert result["left"] == 0, result
        # The first hundreds of steps fill allocators' caches; after that a leak of 2 KiB a step would show.
        settled, last = result["resident"][len(result["resident"]) // 2], result["resident"][-1]
        assert last - settled < STEPS * 1024, result
