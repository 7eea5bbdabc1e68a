"""A backward runs in the name of its task on all threads that autograd takes for it.

In a process of its own: where autograd has threads, a process can fork none that computes gradients.
"""

from __future__ import annotations

from pathlib import Path

from tests.jobs.ranks import outputs_of_ranks


def test_a_backward_has_its_task_on_all_threads() -> None:
    assert outputs_of_ranks(Path(__file__).with_name("task_of_threads.py"), ranks=1) == ["all hold\n"]
