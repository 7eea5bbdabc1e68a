"""The rows of the table, and what is made of their figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """A way to train.

    Attributes:
        name: Its name in the table.
        side: ``ours`` or ``torch``.
        options: What that side's class is made with.
        ranks: How many ranks train.
    """

    name: str
    side: str
    options: dict[str, Any]
    ranks: int = 2


#: As PyTorch's side: every parameter is sharded, and no gradient clipped.
_SHARDED = {
    "ddp": True,
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 0,
    "sdp_gradient_clipping": 1e9,
}

ROWS = (
    Row("pipeline 2", "ours", {"pipeline_parallel_degree": 2}),
    Row("pipeline 2, checkpointing", "ours", {"pipeline_parallel_degree": 2, "checkpointing": True}),
    Row(
        "pipeline 2, checkpointing, disk offload",
        "ours",
        {
            "pipeline_parallel_degree": 2,
            "checkpointing": True,
            "offload_activations": "disk",
            "activation_loading_horizon": 2,
        },
    ),
    Row(
        "pipeline 2, optimizer offload to disk",
        "ours",
        {"pipeline_parallel_degree": 2, "offload_optimizer": "disk"},
    ),
    Row("data parallel 2", "ours", {"ddp": True}),
    Row("data parallel 2, checkpointing", "ours", {"ddp": True, "checkpointing": True}),
    Row("data parallel 2, optimizer sharding", "ours", {"ddp": True, "shard_optimizer_state": True}),
    Row("data parallel 2, sharded, stage 1", "ours", {**_SHARDED, "sdp_stage": 1}),
    Row("data parallel 2, sharded, stage 2", "ours", {**_SHARDED, "sdp_stage": 2}),
    Row("data parallel 2, sharded, stage 3", "ours", {**_SHARDED, "sdp_stage": 3}),
    Row("pipeline 2, sharded 2, stage 2", "ours", {"pipeline_parallel_degree": 2, **_SHARDED, "sdp_stage": 2}, 4),
    Row("pipeline 2, sharded 2, stage 3", "ours", {"pipeline_parallel_degree": 2, **_SHARDED, "sdp_stage": 3}, 4),
    Row("torch DDP 2", "torch", {}),
    Row("torch DDP 2, torch.utils.checkpoint", "torch", {"checkpointing": True}),
    Row("torch FSDP2, stage 2", "torch", {"sharded": True, "reshards": False}),
    Row("torch FSDP2, stage 3", "torch", {"sharded": True}),
)
