"""What a data set applies to its rows and fails at; its tasks import nothing else."""

from __future__ import annotations

from typing import Any

NUMBER = 40


def refuse_row_40(batch: dict[str, Any]) -> dict[str, Any]:
    """Fail for one row, of 48 which tell their numbers in their first value."""
    if NUMBER in (batch["row"][:, 0] * 48).round().astype(int):
        raise ValueError(f"row {NUMBER} is not liked")
    return batch
