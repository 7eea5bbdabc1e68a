"""What the benchmark of checkpoints makes of its times."""

from __future__ import annotations

from benches.checkpoint.figures import BARS, Measured, figures, table
from benches.communication.figures import missed


def measured(ours: float, block: float, read: float = 1.0) -> Measured:
    """Three rounds, of which the machine was slow in one."""
    drift = (1.0, 1.0, 5.0)
    times = {"ours": ours, "copy": 1.0, "torch": 2.0, "dcp": 3.0}
    rounds = {name: [time * slow for slow in drift] for name, time in times.items()}
    blocks = [block * slow for slow in drift]
    return Measured(rounds, rounds, list(drift), blocks, list(drift), [read] * 3, {"save": [1e6]})


def test_speeds_are_compared_within_rounds() -> None:
    """Twice as slow as the copy is half of its speed, and as fast as torch is not faster."""
    found = figures(measured(2.0, 1.25))
    assert found["save_vs_copy"] == found["load_vs_copy"] == 0.5
    assert found["save_vs_torch"] == 1.0
    assert found["save_vs_dcp"] == 1.5
    assert found["async_block_vs_memcpy"] == 1.25
    assert len(missed(found, BARS)) == 4
    assert missed(figures(measured(1.2, 1.25)), BARS) == []
    assert len(missed(figures(measured(1.2, 1.5)), BARS)) == 1
    assert len(missed(figures(measured(1.2, 1.25, 1.01)), BARS)) == 1


def test_the_table_has_a_row_for_each_way() -> None:
    """Four ways to save and to load, another layout, the copy, the background and the memory."""
    assert table(measured(1.0, 1.0), 1 << 30).row_count == 12
