"""What a rank writes of a case, for tests of those who judge it."""

from __future__ import annotations

from typing import Any

from .cases import Case


def usual_row(case: Case, **changes: Any) -> dict[str, Any]:
    """The row of a rank on which all went well, but for these changes."""
    usual = {
        "case": case.name,
        "worst": 1e-15,
        "where": "there",
        "failures": [],
        "parameters": 3,
        "replica": 0,
        "bytes": 24,
        "body_bytes": 8,
        "forward": 4,
        "backward": 4,
        "expected_forward": None,
    }
    return usual | changes
