"""A model that needs more memory than ranks may have trains with what saves memory, and runs out of memory without."""

from __future__ import annotations

import re

from tests.examples.running import EXAMPLES
from tests.jobs.ranks import run_ranks

SCRIPT = EXAMPLES / "larger_than_memory.py"


def test_it_trains_within_the_limit_only_with_what_saves_memory() -> None:
    first, *others = run_ranks(SCRIPT, ranks=4)
    assert [first.code, *(each.code for each in others)] == [0] * 4, first.err
    assert "step 2: loss" in first.out
    for each in run_ranks(SCRIPT, "--plain", ranks=4):
        assert each.code != 0
        assert "step 2: loss" not in each.out
        # What finds no room first is a tensor, or the stack of a thread.
        assert re.search("can't allocate memory|Resource temporarily unavailable|can't start new thread", each.err)
        assert "Memory of rank" in each.err
        assert "smp.set_activation_checkpointing(module) for the layers" in each.err
