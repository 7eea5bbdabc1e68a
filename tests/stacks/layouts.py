"""Layouts of ranks in which trainers are held to one process."""

from __future__ import annotations

from typing import Any

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pipeline_parallel_degree": 2},
    "dp2": {"ddp": True},
    "pp2xdp2": {"pipeline_parallel_degree": 2, "ddp": True},
    # Batches are padded to lengths of their own, which tensor-parallel ranks with different samples would not share.
    "tp2": {"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True},
}
RANKS = {"plain": 1, "pp2": 2, "dp2": 2, "pp2xdp2": 4, "tp2": 2}
