"""A plan whose steps go wrong in every way; none needs torch, so all of them start at once."""

from __future__ import annotations

from tools.gpu_day.plan import Step

PRELOADED = ()
_PACKAGE = "tests.gpu_day.steps"


def _step(name: str, seconds: float = 30) -> Step:
    return Step(name, seconds, "", module=f"{_PACKAGE}.{name}")


PLAN = (
    _step("raises"),
    _step("hangs", 2),
    _step("dies"),
    _step("says_nothing"),
    _step("missing"),
    _step("leaves_a_process"),
    _step("fails"),
    _step("writes_much"),
    Step("elsewhere", 30, "", frozenset({"cuda"}), f"{_PACKAGE}.passes"),
    _step("passes"),
)
