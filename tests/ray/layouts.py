"""Configurations of ranks."""

from __future__ import annotations

from typing import Any

PP2: dict[str, Any] = {"pipeline_parallel_degree": 2, "microbatches": 2}
DP2: dict[str, Any] = {"ddp": True}
PP2_DP2: dict[str, Any] = {**PP2, "ddp": True}
ANY: dict[str, Any] = {
    "pipeline_parallel_degree": 2,
    "elastic_degrees": "pipeline_parallel_degree",
    "microbatches": 2,
    "ddp": True,
}
