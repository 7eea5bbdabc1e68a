"""Seconds that a test asks for are those of an idle machine."""

from __future__ import annotations

import pytest

from tests.jobs import patience
from tests.jobs.patience import Patience, slowdown


@pytest.mark.parametrize(("slower", "passed", "is_over"), [(1.0, 11.0, True), (3.0, 29.0, False), (3.0, 31.0, True)])
def test_they_are_over_when_so_many_times_more_have_passed(
    slower: float, passed: float, is_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(patience.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(patience, "slowdown", lambda: slower)
    waiting = Patience(10.0)
    now[0] = passed
    assert waiting.is_over == is_over


def test_a_machine_on_which_more_wait_than_it_has_processors_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(patience.os, "getloadavg", lambda: (1e6, 0.0, 0.0))
    assert slowdown() == 5e5
