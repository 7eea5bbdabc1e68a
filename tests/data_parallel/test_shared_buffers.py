"""What replicas broadcast has the same size on all of them, whatever its dtype."""

from pathlib import Path

from tests.jobs.ranks import outputs_of_ranks


def test_buffers_of_all_dtypes_are_broadcast_and_differing_ones_refused_in_words() -> None:
    outputs = outputs_of_ranks(Path(__file__).with_name("shared_buffers.py"))
    assert all("buffers are alike" in output for output in outputs)
