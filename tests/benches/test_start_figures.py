"""The parts of ``make bench-start`` that measure nothing."""

from __future__ import annotations

import pytest
from rich.console import Console

from benches.communication.figures import missed
from benches.start.figures import BARS, Measured, figures, table


def _measured() -> Measured:
    return Measured(
        torch_import=[2.0, 4.0, 3.0],
        our_import=[0.1, 0.9, 0.2],
        init=[0.05, 0.06, 0.5],
        our_steps=[[1.2, 0.5], [3.0, 1.0], [2.0, 0.9]],
        plain_steps=[[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]],
        phases=[{"tracing": 0.2}, {"tracing": 0.1}, {"tracing": 0.4}],
    )


def test_figures_are_medians_and_the_ratio_is_taken_within_a_run() -> None:
    found = figures(_measured())
    assert found == {"import_s": 0.2, "init_s": 0.06, "first_step_ratio": pytest.approx(1.5)}
    assert missed(found, BARS) == []


def test_what_is_too_slow_is_missed() -> None:
    found = {"import_s": 0.3, "init_s": 0.19, "first_step_ratio": 1.6}
    assert [sentence.split()[1] for sentence in missed(found, BARS)] == ["import_s", "first_step_ratio"]


def test_the_table_has_a_line_for_each_quantity() -> None:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table(_measured()))
    lines = {line[:35].strip(): line[35:].split() for line in capture.get().splitlines() if line.strip()}
    assert lines["import shardwright, after it"] == ["0.200", "s", "0.100", "s", "0.900", "s"]
    assert lines["step 1, two ranks over plain"] == ["1.500", "1.200", "2.000"]
    assert lines["rank 0: tracing"] == ["0.200", "s", "0.100", "s", "0.400", "s"]
